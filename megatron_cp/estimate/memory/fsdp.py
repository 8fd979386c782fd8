"""Peak memory of fully sharded data parallelism, to judge published figures by. Pure.

PyTorch's FSDP2, as torchtitan trains Llama with it. This project shards no parameters. What is counted:

- parameters, gradients and both moments of AdamW in float32, 16 bytes a parameter, divided over all ranks;
- of each layer the checkpointed input; with selective recomputation also what attention and every second product give
  (torchtitan's ``_apply_ac_to_transformer_block``: products of q, v, w1 and w2 are kept);
- the loss over all tokens, whose backward pass is the peak: logits and their gradients in bf16 (2 + 2 bytes), and in
  float32 logits, log-softmax and gradients (12). Without torch.compile one more copy in bf16;
- nothing for the allocator: the largest blocks are those of the loss, which it gets whole, and what it has reserved for
  the layers' backward passes lies in the place that logits take.
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
    """Bytes of a rank with ``tokens`` of a microbatch, under ``shards`` ranks."""
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
