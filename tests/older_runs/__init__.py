"""Run folders and checkpoints that an earlier version wrote.

Later versions resume them to the same losses.
"""
