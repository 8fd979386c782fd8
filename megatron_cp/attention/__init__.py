"""Context-parallel attention. See docs/explanation/context_parallel.md.

:func:`context_parallel_attention` is the function; :mod:`.modules` has megatron-core's modules over it.
:mod:`.sharding` and :mod:`.tiles` import without torch, so the function is imported on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_cp.attention.functional import context_parallel_attention

__all__ = ["context_parallel_attention"]


def __getattr__(name: str) -> Any:
    if name == "context_parallel_attention":
        from megatron_cp.attention.functional import context_parallel_attention

        return context_parallel_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
