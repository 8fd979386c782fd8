"""Tuning on dialogues against a plain PyTorch and transformers loop.

Both begin from the same weights.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_cp.config.run_config import DatasetConfig
from megatron_cp.convert.exporting import export_model
from megatron_cp.convert.importing import import_model
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.text.tokenizers import HuggingFaceTokenizer
from tests.ranks import run_ranks
from tests.unit_tests.convert.published import publish
from tests.unit_tests.data.text.chat_templates import make_chat_tokenizer

STEPS, BATCH, LONGEST = 10, 5, 384
LR, DECAY, CLIP = 1e-3, 0.1, 1.0
LAYOUTS = {
    "dynamic cp on 4 ranks": ("model.context_parallel_size=4", "model.dynamic_context_parallel=true",
                              "model.max_seqlen_per_dp_cp_rank=96"),
    "tp 2 x cp 2": ("model.tensor_model_parallel_size=2", "model.context_parallel_size=2",
                    "model.sequence_packing_scheduler=dp_balanced"),
}  # fmt: skip


def dialogues() -> list[list[dict[str, str]]]:
    """Return 50 dialogues of one to four answers."""
    rng = np.random.default_rng(3)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "was", "fed"]

    def text(most: int) -> str:
        return " ".join(rng.choice(words, rng.integers(1, most)))

    return [
        [
            {"role": role, "content": text(24)}
            for _ in range(rng.integers(1, 5))
            for role in ("user", "assistant")
        ]
        for _ in range(STEPS * BATCH)
    ]  # fmt: skip


def plain_loop(folder: Path, marked: Path, order: list[tuple[int, ...]]) -> tuple[list[float], list[float], Any]:
    """Train with transformers in the batches of ``order``.

    Returns losses, norms and weights.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    tokenizer = AutoTokenizer.from_pretrained(marked, local_files_only=True)
    samples = {}
    for messages in dialogues():
        found = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True)
        samples[tuple(found["input_ids"])] = torch.tensor(found["assistant_masks"])[1:]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(STEPS):
        batch = order[step * BATCH : (step + 1) * BATCH]
        count = sum(int(samples[ids].sum()) for ids in batch)
        total = 0.0
        optimizer.zero_grad()
        for ids in batch:
            text = torch.tensor([ids])
            logits = model(text[:, :-1]).logits[0]
            per_token = torch.nn.functional.cross_entropy(logits, text[0, 1:], reduction="none")
            loss = (per_token * samples[ids]).sum() / count
            loss.backward()
            total += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(total)
    return losses, norms, model.state_dict()


def publish_and_import(folder: str) -> list[tuple[int, ...]]:
    """Write model, tokenizer and dialogues.

    Returns the ids of the samples in the run's order.
    """
    path = Path(folder)
    publish(path / "hf", "llama", vocab_size=310, max_position_embeddings=LONGEST)
    for name in ("plain", "marked"):
        make_chat_tokenizer(path / name, "chatml", marked=name == "marked")
    for file in (path / "plain").iterdir():
        (path / "hf" / file.name).write_bytes(file.read_bytes())
    lines = [json.dumps({"messages": messages}) + "\n" for messages in dialogues()]
    (path / "chats.jsonl").write_text("".join(lines))
    import_model(path / "hf", path / "imported")
    data = DatasetConfig(kind="jsonl", data_path=str(path / "chats.jsonl"), seq_length=LONGEST, split="1,0,0")
    train = build_datasets(data, HuggingFaceTokenizer(path / "plain"), STEPS * BATCH).train
    assert train is not None
    samples = [train[index] for index in range(STEPS * BATCH)]
    assert max(len(sample["tokens"]) for sample in samples) < LONGEST
    return [(*sample["tokens"].tolist(), int(sample["labels"][-1])) for sample in samples]


@pytest.mark.slow
def test_ten_steps_equal_a_plain_loop(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [order] = run_ranks(publish_and_import, 1, str(tmp_path))
    assert len(set(order)) == len(order)
    losses, norms, weights = plain_loop(tmp_path / "hf", tmp_path / "marked", order)
    assert losses[-1] < losses[0] and max(norms) > CLIP
    for name, layout in LAYOUTS.items():
        code, text = cli(
            *layout,
            f"dataset.data_path={tmp_path}/chats.jsonl",
            "dataset.split='1,0,0'",
            f"dataset.seq_length={LONGEST}",
            f"train.train_iters={STEPS}",
            f"train.global_batch_size={BATCH}",
            "validation.eval_iters=0",
            f"optimizer.lr={LR}",
            f"optimizer.weight_decay={DECAY}",
            f"optimizer.clip_grad={CLIP}",
            "scheduler.lr_decay_style=constant",
            "scheduler.lr_warmup_iters=0",
            "logger.progress=plain",
            "logger.tensorboard=false",
            recipe=str(tmp_path / "imported" / "recipe.yaml"),
            ranks=4,
        )
        assert code == 0, text
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "grad_norm" in line]
        assert [step["lm_loss"] for step in steps] == pytest.approx(losses, rel=2e-6), name
        assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=1e-5), name
        run_ranks(export, 1, str(tmp_path), name)
        trained = load_file(tmp_path / name / "model.safetensors")
        for key, value in trained.items():
            # Weights of 0.15 have a float32 spacing of 1.5e-8. Adam divides by the root of the squared gradient, so
            # rounding of a gradient near zero moves single weights by up to a hundredth of a step.
            difference = (value - weights[key]).abs()
            assert float(difference.mean()) < 3e-8 and float(difference.max()) < 0.02 * LR, (name, key)
        (tmp_path / "run").rename(tmp_path / f"{name} run")


def export(folder: str, name: str) -> None:
    export_model(Path(folder) / "run", Path(folder) / name)
