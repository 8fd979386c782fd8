"""Peak memory of fully sharded data parallelism, to check published figures. Pure.

Models PyTorch's FSDP2 as used by torchtitan for Llama. This project does not shard parameters. Assumptions:

- Parameters, gradients and both AdamW moments are float32: 16 bytes per parameter, divided over all ranks.
- Each layer keeps the checkpointed input. Selective recomputation also keeps the outputs of attention and of every
  second product (q, v, w1 and w2 in torchtitan's ``_apply_ac_to_transformer_block``).
- The peak is the backward pass of the loss, over all tokens. Logits and gradients take 2 + 2 bytes in bf16; logits,
  log-softmax and gradients take 12 bytes in float32. Without torch.compile there is one more bf16 copy.
- Allocator waste is 0: the loss allocates the largest blocks, and they reuse the memory of the layers' backward passes.
"""

from __future__ import annotations


def fully_sharded_peak(
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocabulary: int,
    tokens: int,
    shards: int,
    recompute: str,
    compiled: bool,
) -> float:
    """Estimate peak bytes of one rank under FSDP2.

    tokens: tokens of a microbatch on the rank.
    shards: ranks that share the parameters.
    """
    keys = hidden // heads * kv_heads
    layer = hidden * (2 * hidden + 2 * keys) + 3 * hidden * ffn + 2 * hidden
    parameters = layers * layer + 2 * vocabulary * hidden + hidden
    kept = hidden
    if recompute == "selective":
        kept += hidden + keys + hidden + ffn + hidden
    logits = 16 if compiled else 18
    states = 16 * parameters / shards
    activations = 2 * tokens * kept * layers
    return states + activations + tokens * vocabulary * logits
