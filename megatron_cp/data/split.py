"""Parse ``dataset.split``, the shares of train, validation and test set.

Imports no torch, for the rules.
"""

from __future__ import annotations

import math
import re

from megatron_cp.config.names import NAME

ALL_FOR_TRAINING = (
    f"\"{NAME.dataset.split}='1,0,0'\" {NAME.validation.eval_iters}=0 {NAME.validation.full_validation}=false "
    "(all documents for training)"
)


def shares(split: str) -> list[float]:
    """Return one to three shares, not normalized.

    Raises:
        ValueError: the text has another form; megatron-core would silently take the digits out of it.
    """
    parts = [part.strip() for part in split.split(",")]
    if len(parts) > 3 or not all(re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", part) for part in parts):
        raise ValueError("must be one to three numbers with commas between them")
    numbers = [float(part) for part in parts]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("must be finite numbers")
    if sum(numbers) <= 0:
        raise ValueError("must have a share above 0")
    return numbers
