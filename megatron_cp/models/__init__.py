"""Models: megatron-core's own classes, built from a run's configuration with our attention in their core."""
