"""Synthetic retrieval: needles in a haystack, of exact lengths.

Pure: no torch at import.
"""
