"""Benchmarks that only a GPU can run are configured so that one would."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.gpu_pretrain import MODELS, RECOMPUTE, config_of
from megatron_cp.rules import check


@pytest.mark.parametrize("model", MODELS)
def test_gpu_pretrain_breaks_no_rule_on_one_gpu(model: str) -> None:
    options = argparse.Namespace(tokens=131072, steps=5, warm_up=3, chunk=4096, overrides=[])
    for attention in ("te", "native"):
        for recompute in RECOMPUTE:
            for size in (4096, 131072):
                config = config_of(model, size, attention, recompute, options)
                assert [v for v in check(config, 1, environment="gpu") if v.severity == "error"] == []
