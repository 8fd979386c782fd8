"""Run folders and checkpoints as an earlier version wrote them: later versions go on from them to the same losses."""
