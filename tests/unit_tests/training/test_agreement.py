"""Ranks that were not started alike end at once, all with the same message."""

import os
from typing import Any

from megatron_cp.rules import agreement


def test_another_setting_on_one_rank(cli: Any, monkeypatch: Any) -> None:
    code, text = cli(before=other_arguments)
    assert code == 1 and text.count("the ranks do not run the same thing, nothing was trained") == 1, text
    assert "variable NVTE_FLASH_ATTN=" not in text and "rng.seed" not in text
    assert "error K20: variable NVTE_FUSED_ATTN: differs between ranks: not set on rank 0; 0 on rank 1" in text, text


def other_arguments() -> None:
    if os.environ["RANK"] == "1":
        os.environ["NVTE_FUSED_ATTN"] = "0"


def test_other_code_on_one_rank(cli: Any) -> None:
    code, text = cli(before=other_code)
    assert code == 1 and "error K20: code: differs between ranks" in text, text


def other_code() -> None:
    if os.environ["RANK"] == "1":
        agreement._code_digest = lambda: "another"


def test_another_configuration_on_one_rank(cli: Any) -> None:
    code, text = cli(before=other_configuration)
    assert code == 1 and "error K20: rng.seed: differs between ranks: 1234 on rank 0; 7 on rank 1" in text, text


def other_configuration() -> None:
    from megatron_cp import cli as command_line

    if os.environ["RANK"] == "1":
        original = command_line.load_recipe

        def load_recipe(*args: Any, **kwargs: Any) -> Any:
            config = original(*args, **kwargs)
            config.rng.seed = 7
            return config

        command_line.load_recipe = load_recipe


def test_equal_ranks_pass_with_one_small_exchange(cli: Any) -> None:
    code, text = cli()
    assert code == 0 and "do not run the same thing" not in text, text
