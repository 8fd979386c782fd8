"""The parallel layouts whose training must equal one rank's.

Each is a pair (world size, overrides).
"""

from typing import Any

CP2 = {"model__context_parallel_size": 2}
# In larger microbatches: every message of one costs four ranks on two cores a switch of processes.
CP4 = {"model__context_parallel_size": 4, "train__micro_batch_size": 2}
TP2 = {"model__tensor_model_parallel_size": 2}
SP = {"model__sequence_parallel": True}
# With the weights of the others, its sixth step multiplies a last bit's difference a hundredfold.
SIX_LAYERS = {"model__num_layers": 6, "model__init_method_std": 0.1}
PP2 = {"model__pipeline_model_parallel_size": 2}
VPP2 = {"model__virtual_pipeline_model_parallel_size": 2}
PIPELINE = "model__pipeline_model_parallel_size"
HCP = {"model__cp_comm_type": "a2a+p2p", "model__hierarchical_context_parallel_sizes": [2, 2]}
MIXED = HCP | {"model__cp_comm_type": ["a2a+p2p", "p2p", "a2a", "all_gather"]}


def batch_for(world_size: int, layout: dict[str, Any]) -> dict[str, Any]:
    """Return a larger microbatch, which halves the messages, where it fits.

    At least two microbatches are left, and no pipeline needs all four.
    """
    replicas = world_size // (
        layout.get("model__tensor_model_parallel_size", 1) * layout.get("model__context_parallel_size", 1)
    )
    return {} if PIPELINE in layout or replicas > 1 else {"train__micro_batch_size": 2}


def layers_for(*settings: dict[str, Any]) -> dict[str, Any]:
    """Return two layers where four show no more.

    Neither stages nor a list may name each of four.
    """
    each = {name: value for some in settings for name, value in some.items()}
    named = any(isinstance(each.get(f"model__{name}"), list) for name in ("cp_comm_type", "moe_layer_freq"))
    return {} if PIPELINE in each or named else {"model__num_layers": 2}


def over(transport: str) -> dict[str, Any]:
    return {"model__cp_comm_type": transport}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2 p2p": (2, CP2 | over("p2p")),
    "cp2 all_gather": (2, CP2 | over("all_gather")),
    "cp2 a2a": (2, CP2 | over("a2a")),
    "cp4 p2p": (4, CP4 | over("p2p")),
    "cp4 all_gather": (4, CP4 | over("all_gather")),
    "cp4 a2a": (4, CP4 | over("a2a")),
    "cp4 a2a+p2p [2,2]": (4, CP4 | HCP),
    "cp4 a layer each": (4, CP4 | MIXED),
    "tp2 cp2": (4, TP2 | CP2),
    "tp2 sp cp2": (4, TP2 | SP | CP2),
    "pp2 cp2": (4, PP2 | CP2),
    "pp2 vpp2 cp2": (4, PP2 | VPP2 | CP2),
    "dp2 cp2": (4, CP2),
}
