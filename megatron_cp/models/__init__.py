"""Models: megatron-core's classes with our attention."""
