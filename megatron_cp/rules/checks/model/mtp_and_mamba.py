"""I rules on multi-token prediction and Mamba."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.attention.transports.registry import ALL_GATHER
from megatron_cp.config.names import NAME
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.checks.parallel.context_parallel import FLAT


@rule(
    "I2",
    "Multi-token prediction is causal.",
    "Multi-token prediction predicts tokens further ahead; full attention would see them.",
    broken(model=dict(mtp_num_layers=1, attention_mask_type="no_mask")),
)
def prediction_is_causal(c: Context) -> Iterator[Finding]:
    not_causal = c.model.attention_mask_type != "causal"
    learned = c.model.position_embedding_type == "learned_absolute"
    if c.model.mtp_num_layers and (not_causal or learned):
        changes = [f"{NAME.model.attention_mask_type}=causal"] if not_causal else []
        changes += [f"{NAME.model.position_embedding_type}=rope"] if learned else []
        message = "Multi-Token Prediction (MTP) needs causal attention and rotary (or no) position embeddings"
        yield Finding(NAME.model.mtp_num_layers, message, " ".join(changes), "=null")


@rule(
    "I14",
    "Layers of multi-token prediction are recomputed one at a time.",
    "megatron-core asserts this for the uniform method, without a message for users, and ignores these layers in "
    "the block method. In hybrid models they are recomputed like the model's own layers.",
    broken(
        model=dict(mtp_num_layers=1, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
    ),
)
def prediction_is_recomputed(c: Context) -> Iterator[Finding]:
    model = c.model
    if not model.mtp_num_layers or model.architecture == "hybrid" or model.recompute_granularity != "full":
        return
    if model.recompute_method == "uniform" and model.recompute_num_layers not in (None, 1):
        yield Finding(
            NAME.model.recompute_num_layers,
            f"recompute_num_layers must be 1 for MTP recompute, got {model.recompute_num_layers}",
            "=1",
        )
    elif model.recompute_method == "block":
        message = "recompute_method=block is not supported for MTP: activations of the MTP layers are kept"
        yield Finding(NAME.model.recompute_method, message, "=uniform", severity="warning")


@rule(
    "I3",
    "Mamba layers do not use hierarchical context parallelism.",
    "Their all-to-all runs over the whole context-parallel group; only attention layers use the levels.",
    broken(model=dict(architecture="hybrid", hybrid_layer_pattern="M*M*", mamba_num_groups=4)),
    severity="warning",
)
def mamba_is_flat(c: Context) -> Iterator[Finding]:
    if "M" in c.model.layer_letters and c.max_cp > 1 and c.hierarchical:
        yield Finding(
            NAME.model.cp_comm_type,
            f"{c.hierarchical.name} applies to the attention layers; Mamba layers use one flat group",
            f"{FLAT} (silences this warning)",
            " ".join(ALL_GATHER.settings),
        )
