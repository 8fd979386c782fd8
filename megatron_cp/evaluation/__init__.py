"""Evaluate a checkpoint on files, every sample once.

Sums are by document, position and file.
"""
