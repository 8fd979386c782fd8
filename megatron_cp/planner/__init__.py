"""Find the layout of a run: enumerate, estimate memory and time, rank. Pure: no torch, no GPU."""
