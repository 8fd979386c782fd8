"""Write the run folders of this directory again, with the present code.

    python -m tests.older_runs.make NAME ...

A folder is a run that was killed after its second iteration. A file beside it has the losses of its next two
iterations. A folder is made once, and then kept while the code changes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SAVED, LAST = 2, 4
TINY = [
    "dataset.kind=mock",
    "dataset.seq_length=32",
    "model.hidden_size=16",
    "model.ffn_hidden_size=32",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.kv_channels=8",
    "tokenizer.tokenizer_type=NullTokenizer",
    "tokenizer.vocab_size=63",
    "model.make_vocab_size_divisible_by=8",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "optimizer.lr=1e-3",
    "optimizer.min_lr=1e-4",
    "scheduler.lr_warmup_iters=1",
    f"train.train_iters={LAST}",
    f"checkpoint.save_interval={SAVED}",
    "checkpoint.save=run",
    "logger.tensorboard=false",
    "logger.progress=none",
]
# Recipe and settings, all for two ranks.
CASES = {
    "dense": ("llama_tiny_p2p_pretrain_config", "model.num_layers=2", "model.context_parallel_size=2"),
    "experts": (
        "llama_tiny_pretrain_config",
        "model.num_layers=2",
        "model.context_parallel_size=1",
        "model.cp_comm_type=p2p",
        "model.hierarchical_context_parallel_sizes=null",
        "model.num_moe_experts=2",
        "model.moe_ffn_hidden_size=16",
        "model.expert_model_parallel_size=2",
        "model.moe_aux_loss_coeff=1e-2",
        "model.mtp_num_layers=1",
    ),
    "hybrid": (
        "mamba_hybrid_tiny_pretrain_config",
        "model.hybrid_layer_pattern=M*-",
        "model.num_layers=3",
        "model.mamba_state_dim=8",
        "model.mamba_head_dim=8",
        "model.mamba_num_groups=2",
        "model.context_parallel_size=2",
    ),
    "packed": (
        "llama_tiny_dynamic_cp_pretrain_config",
        "model.num_layers=2",
        "dataset.kind=mock_documents",
        "model.context_parallel_size=1",
        "model.max_seqlen_per_dp_cp_rank=32",
    ),
}


def arguments(name: str) -> list[str]:
    recipe, *settings = CASES[name]
    return ["--recipe", recipe, *TINY, *settings]


def numbers(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("iteration", "lm_loss", "grad_norm")} for line in lines if "lm_loss" in line]


def make(name: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "megatron_cp.torchrun", "--nproc_per_node=2", "-m", "megatron_cp", "train"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([*command, *arguments(name)], cwd=scratch, env=environment, check=True)
        run, kept = Path(scratch, "run"), HERE / name
        came_to = numbers(run)
        shutil.rmtree(run / f"iter_{LAST:07}")
        (run / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["iteration"] <= SAVED))
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(run, kept)
        (kept / "came_to.json").write_text(json.dumps(came_to[SAVED:], indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=CASES)
    for each in parser.parse_args().names:
        make(each)
