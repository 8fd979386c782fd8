"""Whether a layout trains the same model as one rank does: run both on the same tokens and compare."""
