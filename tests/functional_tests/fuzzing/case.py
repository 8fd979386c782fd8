"""Build a case: copies of examples, changes to them, and limits of a run."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.functional_tests.fuzzing.mutations import mutate

# Added after all changes: output paths, number of steps, and sizes for which a step takes milliseconds.
WRITES = ["checkpoint.save=out/run", "dataset.path_to_cache=out/cache", "logger.tensorboard_dir=null"]
SMALL = [
    "train.train_iters=1",
    "train.train_samples=null",
    "train.global_batch_size=1",
    "train.micro_batch_size=1",
    "validation.eval_iters=0",
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.ffn_hidden_size=32",
    "model.num_attention_heads=2",
    "model.num_query_groups=1",
    "model.kv_channels=8",
    "model.vocab_size=null",
    "model.make_vocab_size_divisible_by=128",
    "dataset.seq_length=16",
    "model.seq_length=16",
    "dataset.num_workers=0",
    "checkpoint.async_save=false",
]


@dataclass(frozen=True)
class Case:
    """Mutated input of a command.

    The command runs in ``work``. ``examples`` contains the valid inputs.
    """

    rng: random.Random
    work: Path
    examples: Path
    valid: bool = False  # nothing is changed

    def take(self, name: str, under: str = "input") -> Path:
        """Copy an example (a file or folder) into the case.

        Returns its path below ``work``.
        """
        source, target = self.examples / name, self.work / under / Path(name).name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target, symlinks=True) if source.is_dir() else shutil.copy(source, target)
        return target.relative_to(self.work)

    def change(self, path: Path) -> None:
        self.change_some([self.work / path])

    def change_some(self, files: list[Path]) -> None:
        """Change one of the files, sometimes two different ones."""
        for file in self.rng.sample(files, min(len(files), self.rng.choice([1, 1, 1, 2]))):
            if not self.valid:
                mutate(self.rng, file)

    def files(self, folder: Path, *patterns: str) -> list[Path]:
        root = self.work / folder
        return sorted({path for pattern in patterns for path in root.glob(pattern) if path.is_file()})


def checked_or_trained(case: Case, *arguments: str) -> list[str]:
    """Choose mostly a check of the configuration, sometimes a run."""
    what = case.rng.random()
    if what < 0.4:
        return ["validate", *arguments]
    return ["train", *arguments, *WRITES, *(["--dry-run", "--environment=cpu"] if what < 0.7 else SMALL)]
