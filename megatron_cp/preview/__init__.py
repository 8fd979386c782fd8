"""Show what a training step reads, in one process and without a model."""
