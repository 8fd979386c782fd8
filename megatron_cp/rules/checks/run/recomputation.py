"""K rules on recomputation of activations in the backward pass."""

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
# model.recompute_granularity -> settings that it ignores. A number of layers is an error for selective.
_NOT_READ = {
    None: _SETTINGS,
    "full": (NAME.model.recompute_modules,),
    "selective": (NAME.model.recompute_method,),
}


@rule(
    "K7",
    "The settings of activation recomputation are complete and supported.",
    "megatron-core needs a method and a number of layers for 'full', and neither for 'selective'. Without a "
    "granularity it silently ignores both and keeps all activations. A recomputed mlp returns its bias parameter as "
    "an output, and the backward pass repeats until memory runs out. Recomputing mla_up_proj or layernorm compiles "
    "C++ in the first backward pass (torch's share_storage_ext). A GPU machine then needs ninja and a compiler. A "
    "lock file of an earlier attempt makes torch wait without a message. Saved activations are distributed over the "
    "MPU's groups, for whole layers only and not in hybrid models. Only recomputed layers have inputs to "
    "offload.",
    broken(model=dict(recompute_granularity="full")),
)
def recomputation(c: Context) -> Iterator[Finding]:
    yield from _layers(c)
    yield from _distributed(c)
    yield from _offloaded(c)
    kind, granularity = c.model.recompute_granularity, NAME.model.recompute_granularity
    message, others = f"has no effect with {granularity}={kind}", []
    if kind is None:
        message = f"has no effect: {granularity} is null"
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
        message = f"needs {NAME.model.recompute_granularity}=full"
    elif model.architecture == "hybrid":
        message = "not supported in hybrid models: the input of the first layer is a view of the embeddings"
    elif c.config.dist.use_decentralized_pg:
        message = f"needs the MPU's groups, which {NAME.dist.use_decentralized_pg}=true does not build"
        fix += f", or {NAME.dist.use_decentralized_pg}=false"
    else:
        return
    yield Finding(NAME.model.distribute_saved_activations, message, fix)


def _offloaded(c: Context) -> Iterator[Finding]:
    field, granularity = NAME.model.offload_layer_inputs, NAME.model.recompute_granularity
    if c.model.offload_layer_inputs and c.model.recompute_granularity != "full":
        yield Finding(field, f"needs {granularity}=full: only recomputed layers save an input", WHOLE_LAYERS, "=false")


def _modules(c: Context) -> Iterator[Finding]:
    model, field = c.model, NAME.model.recompute_modules
    on_cpu, parts = c.environment.device == "cpu", model.layer_letters
    if model.attention_head_groups > 1 and "core_attn" in (chosen := model.recompute_modules or ["core_attn"]):
        message = f"core_attn has no effect with {NAME.model.attention_head_groups}: its inputs are not kept anyway"
        others = [name for name in chosen if name != "core_attn"]
        fix = typed(field, others) if others else f"{NAME.model.recompute_granularity}=null {field}=null"
        yield Finding(field, message, fix, severity="warning")
    allowed = {"core_attn": True, "mlp": not model.add_bias_linear, "layernorm": c.te_layers}
    allowed |= {"moe": "E" in parts, "mla_up_proj": model.multi_latent_attention and not on_cpu}
    for name in model.recompute_modules or []:
        if name == "mlp" and "-" not in parts:
            fix = typed(field, ["moe" if "E" in parts else "core_attn"])
            yield Finding(field, "mlp has no effect: no layer has an MLP", fix, severity="warning")
        elif name == "mlp" and model.add_bias_linear:
            message = f"mlp with {NAME.model.add_bias_linear}=true is recomputed until memory runs out"
            yield Finding(field, message, WHOLE_LAYERS)
        elif name == "mlp" and model.mlp_chunk_size is not None:
            others = [other for other in model.recompute_modules or [] if other != "mlp"] or ["core_attn"]
            message = f"mlp has no effect: {NAME.model.mlp_chunk_size} recomputes it in tiles"
            yield Finding(field, message, typed(field, others), severity="warning")
        elif name == "mla_up_proj" and model.multi_latent_attention and on_cpu:
            message = "recomputing mla_up_proj needs a GPU"
            yield Finding(field, message, WHOLE_LAYERS)
        elif not allowed.get(name, False):
            yield Finding(
                field,
                f"Invalid choices for recompute_modules: {name} (layernorm needs Transformer Engine)",
                values=[[n for n in model.recompute_modules or [] if allowed.get(n, False)] or ["core_attn"]],
            )
