"""K, of recomputation: activations that the backward pass makes again instead of finding them kept."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp.config.names import NAME
from megatron_cp.rules.base import Context, Finding, broken, rule
from megatron_cp.rules.proposals import default_of, typed

_METHOD = f"{NAME.model.recompute_method}=uniform {NAME.model.recompute_num_layers}=1"
WHOLE_LAYERS = f"{NAME.model.recompute_granularity}=full {_METHOD} {NAME.model.recompute_modules}=null"
_SETTINGS = (
    NAME.model.recompute_method,
    NAME.model.recompute_num_layers,
    NAME.model.recompute_modules,
    NAME.model.distribute_saved_activations,
)
# By model.recompute_granularity, what it does not look at. A number of layers is refused for selective.
_NOT_READ = {
    None: _SETTINGS,
    "full": (NAME.model.recompute_modules,),
    "selective": (NAME.model.recompute_method,),
}


@rule(
    "K7",
    "Activation recomputation is fully described, and can be done.",
    "megatron-core needs a method and a number of layers for 'full', and neither number for 'selective'. With none of "
    "the two it ignores them, silently, and keeps all activations. A recomputed mlp gives its bias parameter back as "
    "an output of its own, and the backward pass begins again until no memory is left. Recomputing mla_up_proj or "
    "layernorm compiles C++ in the first backward pass (torch's share_storage_ext). A GPU's machine must then have "
    "ninja and a compiler. It must not have the lock file of an earlier attempt: torch waits for it and logs nothing. "
    "Activations are "
    "distributed by the MPU's groups, of whole layers only, and those of a hybrid model cannot be.",
    broken(model=dict(recompute_granularity="full")),
)
def recomputation(c: Context) -> Iterator[Finding]:
    yield from _layers(c)
    yield from _distributed(c)
    kind, granularity = c.model.recompute_granularity, NAME.model.recompute_granularity
    message, others = f"has no effect on {granularity}={kind}", []
    if kind is None:
        message = f"has no effect: {granularity} is null, and nothing is recomputed"
        others = [f"{granularity}=full", f"{granularity}=selective"]
    for field in filter(c.config.value_at, _NOT_READ[kind]):
        yield Finding(field, message, default_of(field), *others, severity="warning")
    if kind == "selective":
        yield from _modules(c)


def _layers(c: Context) -> Iterator[Finding]:
    model = c.model
    kind, layers = model.recompute_granularity, model.num_layers // c.pp
    if kind == "full" and model.recompute_method is None:
        yield Finding(
            NAME.model.recompute_method,
            'Using recompute_granularity: full so recompute_method must be "block" or "uniform"',
            _METHOD,
        )
    elif kind == "full" and not 1 <= (model.recompute_num_layers or 0) <= max(1, layers):
        yield Finding(
            NAME.model.recompute_num_layers,
            "When using recompute_granularity: full recompute_num_layers must be between 1 and "
            f"num_layers_per_pipeline_rank: {layers}",
            "=1",
        )
    if kind == "selective" and model.recompute_num_layers is not None:
        yield Finding(
            NAME.model.recompute_num_layers,
            "When using recompute_granularity: selective recompute_num_layers must be None.",
            "=null",
        )


def _distributed(c: Context) -> Iterator[Finding]:
    model = c.model
    if model.recompute_granularity is None or not model.distribute_saved_activations:
        return
    fix = f"{NAME.model.distribute_saved_activations}=false"
    if model.sequence_parallel or c.tp == 1:
        message = "distribute_saved_activations must be false when sequence parallel is enabled, and needs tp > 1"
    elif model.recompute_granularity == "selective":
        message = f"distributes nothing of {NAME.model.recompute_granularity}=selective: whole layers (full) only"
    elif model.architecture == "hybrid":
        message = "cannot be done for hybrid models, whose first layer is given a view of the embeddings"
    elif c.config.dist.use_decentralized_pg:
        message = f"distributes by the MPU's groups, which are not there with {NAME.dist.use_decentralized_pg}=true"
        fix += f", or {NAME.dist.use_decentralized_pg}=false"
    else:
        return
    yield Finding(NAME.model.distribute_saved_activations, message, fix)


def _modules(c: Context) -> Iterator[Finding]:
    model, field = c.model, NAME.model.recompute_modules
    on_cpu, parts = c.environment.device == "cpu", model.parts
    allowed = {"core_attn": True, "mlp": not model.add_bias_linear, "layernorm": c.te_layers}
    allowed |= {"moe": "E" in parts, "mla_up_proj": model.multi_latent_attention and not on_cpu}
    for name in model.recompute_modules or []:
        if name == "mlp" and "-" not in parts:
            fix = typed(field, ["moe" if "E" in parts else "core_attn"])
            yield Finding(field, "mlp has no effect: no layer has one", fix, severity="warning")
        elif name == "mlp" and model.add_bias_linear:
            message = f"mlp with {NAME.model.add_bias_linear}=true is recomputed without end, until no memory is left"
            yield Finding(field, message, WHOLE_LAYERS)
        elif name == "mla_up_proj" and model.multi_latent_attention and on_cpu:
            message = "mla_up_proj compiles C++ during the first backward pass, which is for GPUs only"
            yield Finding(field, message, WHOLE_LAYERS)
        elif not allowed.get(name, False):
            yield Finding(
                field,
                f"Invalid choices for recompute_modules: {name} (layernorm needs Transformer Engine)",
                values=[[n for n in model.recompute_modules or [] if allowed.get(n, False)] or ["core_attn"]],
            )
