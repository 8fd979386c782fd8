"""Router losses that a step reports.

``training/layouts/test_model_variants.py`` and ``training/packed/test_equivalence.py`` check that layouts and packs
report the same.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

from megatron_cp.config.run_config import LoggerConfig
from megatron_cp.training.monitor.metrics import Reporter
from megatron_cp.training.monitor.step_metrics import StepMetrics
from megatron_cp.training.step import train_step
from tests.ranks import run_ranks
from tests.training_runs import start, tiny_config

EXPERTS = {
    "model__num_moe_experts": 4,
    "model__moe_ffn_hidden_size": 48,
    "model__moe_layer_freq": [0, 1, 1, 1],
    "model__moe_router_load_balancing_type": "aux_loss",
    "model__moe_aux_loss_coeff": 0.1,
    "model__moe_z_loss_coeff": 0.01,
    "train__micro_batch_size": 2,
}


def ours_and_upstreams(overrides: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    run, batches = start(tiny_config(**overrides))
    tracker, ours = MoEMetricsTracker(), run.router_losses
    assert ours is not None
    record = ours.record

    def both(*args: Any, **kwargs: Any) -> None:
        tracker.record(*args, **kwargs)
        record(*args, **kwargs)

    ours.record = both
    step = next(batches)
    result = train_step(run, step.microbatches)
    totals: dict[str, torch.Tensor] = {}
    tracker.report(
        1 / len(step.microbatches),
        1,
        num_layers=run.config.model.num_layers,
        moe_layer_freq=run.config.model.moe_layer_freq,
        mtp_num_layers=run.config.model.mtp_num_layers,
        total_loss_dict=totals,
    )
    run.close()
    return result.router_losses, {name: float(value) for name, value in totals.items()}


@pytest.mark.parametrize("more", [{}, {"model__moe_router_load_balancing_type": "seq_aux_loss"}], ids=["", "sequences"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_they_are_megatron_cores(ranks: int, more: dict[str, Any]) -> None:
    for ours, theirs in run_ranks(ours_and_upstreams, ranks, EXPERTS | more):
        assert len(ours) == 2
        assert ours == pytest.approx(theirs, rel=1e-6) and ours["z_loss"] != pytest.approx(1.0)


def of_two_steps(overrides: dict[str, Any]) -> list[dict[str, float]]:
    run, batches = start(tiny_config(**overrides, optimizer__lr=0.0, optimizer__min_lr=0.0))
    first, *_ = microbatches = next(batches).microbatches
    losses = [train_step(run, given).router_losses for given in (microbatches, microbatches, [first] * 2)]
    run.close()
    return losses


def test_each_step_has_its_own() -> None:
    ((first, again, other),) = run_ranks(of_two_steps, 1, EXPERTS)
    assert first == again and all(other[name] != value for name, value in first.items())


def test_a_layer_that_depths_share_reports_its_mean() -> None:
    depths = {"model__mtp_num_layers": 2, "model__mtp_use_repeated_layer": True, "model__num_layers": 1}
    alone = {"model__moe_layer_freq": 1, "model__moe_z_loss_coeff": None, "train__micro_batch_size": 4}
    ((first, _, _),) = run_ranks(of_two_steps, 1, EXPERTS | alone | depths)
    apart = {"model__mtp_use_repeated_layer": False}
    ((separate, _, _),) = run_ranks(of_two_steps, 1, EXPERTS | alone | depths | apart)
    # Near 1 where experts are chosen alike; a mean that counted each of the two uses for a half would be near 2/3.
    assert first["load_balancing_loss"] == pytest.approx(separate["load_balancing_loss"], rel=0.1)


def test_only_requested_losses_are_reported() -> None:
    silent = {"model__moe_aux_loss_coeff": 0.0, "model__moe_z_loss_coeff": None}
    balanced = {"model__moe_router_load_balancing_type": "none"}
    weightless = silent | {"model__moe_z_loss_coeff": 0.0}  # upstream reports 0 / 0 for it
    for more, names in ((weightless, []), (silent, []), (balanced, ["z_loss"]), (None, [])):
        ((losses, _, _),) = run_ranks(of_two_steps, 1, {} if more is None else EXPERTS | more)
        assert list(losses) == names


def test_they_are_metrics_of_their_own(tmp_path: Path) -> None:
    given = {"load_balancing_loss": 1.25, "z_loss": 3.0}
    metrics = StepMetrics(1, 4, 128, 128, 32, 5.0, 1.0, 1e-3, 0.1, 1.0, 1.0, 1.0, 1.0, 4, False, router_losses=given)
    reporter = Reporter(LoggerConfig(), 10, tmp_path)
    reporter.step(metrics)
    reporter.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["load_balancing_loss"], line["z_loss"]) == (1.25, 3.0) and "router_losses" not in line
