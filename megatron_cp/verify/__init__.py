"""Compare a layout's training results with a single rank on the same tokens."""
