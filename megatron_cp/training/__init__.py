"""Training: setup, loop, step, checkpoints and metrics."""
