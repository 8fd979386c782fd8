"""All rules, one file per topic. Importing this package registers them."""

# ruff: noqa: F401

from megatron_cp.rules.checks.model import (
    architecture,
    attention,
    experts,
    fusions,
    head_groups,
    heads,
    layer_variants,
    loss,
    mtp_and_mamba,
    positions,
)
from megatron_cp.rules.checks.parallel import context_parallel, groups, packing, sequence, sizes, stages
from megatron_cp.rules.checks.run import (
    checkpointing,
    data,
    length_mixture,
    logging,
    memory,
    optimizer,
    recomputation,
    settings,
    variables,
)
