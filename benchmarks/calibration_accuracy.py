"""Calibrate the time model with a few runs, and predict other layouts' steps.

The runs are on this machine.

    python benchmarks/calibration_accuracy.py                       # train all layouts twice, in turns: 20 minutes
    python benchmarks/calibration_accuracy.py --runs FOLDER         # predict again from runs of an earlier call

All layouts train the same model on four gloo ranks, each a run folder that ``megatron-cp plan --calibrate`` reads. The
device is fitted to three of them. The others are predicted. To measure a layout again, delete its folder.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

from megatron_cp.estimate.device import load_device  # noqa: E402
from megatron_cp.report.calibration import calibrate, measured_run  # noqa: E402
from megatron_cp.report.runs import read_runs  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.training_runs import tiny_config  # noqa: E402

RANKS = 4
STEPS = 5
SHAPES = {
    "narrow": dict(model__num_layers=8, model__hidden_size=256, model__ffn_hidden_size=768, dataset__seq_length=512),
    "wide": dict(model__num_layers=4, model__hidden_size=384, model__ffn_hidden_size=1024, dataset__seq_length=1024),
}
COMMON = dict(
    model__num_query_groups=8,
    train__global_batch_size=8,
    train__train_iters=STEPS,
    model__init_method_std=0.02,
    optimizer__use_distributed_optimizer=True,
)
LENGTHS = [96, 320, 128, 512, 256, 48, 200, 400, 64, 450, 160, 320] * 8  # of packed samples
_SIZES = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context"}


def layout(**settings: Any) -> dict[str, Any]:
    """Return settings of a layout.

    ``tp``, ``pp`` and ``cp`` are sizes, other names those of the model's settings.
    """
    found = {}
    for name, value in settings.items():
        found["model__" + (f"{_SIZES[name]}_parallel_size" if name in _SIZES else name)] = value
    return found


def packs(**settings: Any) -> dict[str, Any]:
    """Return settings of a layout for packed samples."""
    data = dict(dataset__kind="mock_documents", train__global_batch_size=16)
    return layout(max_seqlen_per_dp_cp_rank=256, **settings) | data


TWO_BY_TWO = dict(cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=[2, 2])
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
CALIBRATION = {
    "dp4": layout(),
    "tp4": layout(tp=4),
    "cp4-p2p": layout(cp=4),
}
OTHERS = {
    "tp2-cp2": layout(tp=2, cp=2, sequence_parallel=True),
    "pp2-cp2-a2a": layout(pp=2, cp=2, cp_comm_type="a2a"),
    "tp4-sp": layout(tp=4, sequence_parallel=True),
    "tp2-sp-dp2": layout(tp=2, sequence_parallel=True),
    "tp2-pp2": layout(tp=2, pp=2),
    "pp2-dp2": layout(pp=2),
    "pp2-vpp2-dp2": layout(pp=2, virtual_pipeline_model_parallel_size=2),
    "pp4": layout(pp=4),
    "cp4-all_gather": layout(cp=4, cp_comm_type="all_gather"),
    "cp4-a2a": layout(cp=4, cp_comm_type="a2a"),
    "cp4-a2a+p2p": layout(cp=4, **TWO_BY_TWO),
    "cp2-p2p-dp2": layout(cp=2),
    "cp2-a2a-dp2": layout(cp=2, cp_comm_type="a2a"),
    "cp2-all_gather-tp2": layout(cp=2, tp=2, cp_comm_type="all_gather"),
    "cp2-p2p-pp2": layout(cp=2, pp=2),
    "dp4-full": layout(**FULL),
    "cp4-p2p-full": layout(cp=4, **FULL),
    "tp2-cp2-full": layout(tp=2, cp=2, sequence_parallel=True, **FULL),
    "dp4-core_attn": layout(recompute_granularity="selective", recompute_modules=["core_attn"]),
    "dp4-mbs2": layout() | {"train__micro_batch_size": 2},
    "cp4-batch16": layout(cp=4) | {"train__global_batch_size": 16},
    "cp4-2048": layout(cp=4) | {"dataset__seq_length": 2048},
    "packs-dynamic": packs(dynamic_context_parallel=True),
    "packs-cp2": packs(cp=2, sequence_packing_scheduler="dp_balanced"),
    "packs-dynamic-tp2": packs(dynamic_context_parallel=True, tp=2),
}


def train(settings: dict[str, Any]) -> None:
    from megatron_cp.training.train import run_training

    run_training(tiny_config(**settings))


def tau(a: list[float], b: list[float]) -> float:
    """Return Kendall's rank correlation."""
    pairs = [(i, j) for i in range(len(a)) for j in range(i)]
    agreeing = sum(1 if (a[i] - a[j]) * (b[i] - b[j]) > 0 else -1 for i, j in pairs)
    return agreeing / len(pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, help="folder of the runs; trained if it does not exist")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each layout, in turns")
    parser.add_argument("--shape", choices=SHAPES, default="narrow", help="the model")
    args = parser.parse_args()
    root = args.runs or Path(tempfile.mkdtemp(prefix="calibration"))
    root.mkdir(parents=True, exist_ok=True)
    lengths = root / "lengths.txt"
    lengths.write_text("\n".join(map(str, LENGTHS)))
    for turn in range(args.rounds):
        for name, settings in (CALIBRATION | OTHERS).items():
            folder = root / f"{name}.{turn}"
            if folder.exists():
                continue
            run = {"checkpoint__save": str(folder), "checkpoint__save_interval": None}
            if "dataset__kind" in settings:
                run["dataset__mock_lengths"] = str(lengths)
            run_ranks(train, RANKS, COMMON | SHAPES[args.shape] | settings | run, timeout=300)
            print(name, turn, flush=True)

    def runs_of(name: str) -> list[Path]:
        return [root / f"{name}.{turn}" for turn in range(args.rounds)]

    found = calibrate([path for name in CALIBRATION for path in runs_of(name)], load_device("cpu"))
    print(found)
    device = found.fit.device
    measured, predicted = [], []
    for name in OTHERS:
        runs = [measured_run(each, device, device.gpus_per_node) for each in read_runs(runs_of(name))]
        seconds = [run.seconds for run in runs]
        measured.append(sum(seconds) / len(seconds))
        predicted.append(runs[0].predict(device, device.gpus_per_node))
        spread, ratio = (max(seconds) - min(seconds)) / measured[-1], predicted[-1] / measured[-1]
        print(f"{name:20} measured {measured[-1]:6.3f} s, spread {spread:4.0%}, predicted / measured {ratio:5.2f}")
    errors = [abs(a / b - 1) for a, b in zip(predicted, measured, strict=True)]
    rank = tau(measured, predicted)
    print(f"{len(errors)} layouts: mean error {mean(errors):.1%}, worst {max(errors):.1%}, Kendall's tau {rank:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
