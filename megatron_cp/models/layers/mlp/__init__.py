"""MLPs in tiles, and their activation."""
