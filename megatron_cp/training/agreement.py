"""Whether all ranks run the same thing: configuration, code, libraries and key variables, compared at the start."""

from __future__ import annotations

from megatron_cp.config import RunConfig
from megatron_cp.errors import RuntimeFault, format_violations
from megatron_cp.parallel.agree import everyones
from megatron_cp.rules import Environment
from megatron_cp.rules.agreement import differences, digest, fingerprint


def check_all_ranks_agree(config: RunConfig) -> None:
    """Compare a digest of everything that must be equal; collective, one small exchange if all is well.

    Raises:
        RuntimeFault: on every rank, naming the fields that differ and which ranks have what.
    """
    mine = fingerprint(config, Environment.detect())
    if len(set(everyones(digest(mine)))) == 1:
        return
    found = format_violations(differences(everyones(mine)))
    raise RuntimeFault(f"the ranks do not run the same thing, nothing was trained.\n{found}", on_all_ranks=True)
