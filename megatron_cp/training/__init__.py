"""Training: set-up, loop, step, checkpoints and metrics, each in a module of its own."""
