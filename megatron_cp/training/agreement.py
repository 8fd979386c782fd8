"""Whether all ranks run the same thing: configuration, code, libraries and key variables, compared at the start."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_cp.config import RunConfig
from megatron_cp.errors import RuntimeFault, format_violations
from megatron_cp.rules import Environment
from megatron_cp.rules.agreement import differences, digest, fingerprint


def check_all_ranks_agree(config: RunConfig) -> None:
    """Compare a digest of everything that must be equal; collective, one small exchange if all is well.

    Raises:
        RuntimeFault: on every rank, naming the fields that differ and which ranks have what.
    """
    mine = fingerprint(config, Environment.detect())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest(mine))
    if len(set(digests)) == 1:
        return
    fingerprints: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(fingerprints, mine)
    raise RuntimeFault(
        "the ranks do not run the same thing, nothing was trained.\n" + format_violations(differences(fingerprints)),
        on_all_ranks=True,
    )
