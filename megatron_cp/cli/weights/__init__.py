"""Commands that convert or use the weights of a checkpoint."""
