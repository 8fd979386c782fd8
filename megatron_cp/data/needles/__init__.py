"""Synthetic retrieval: needles in a haystack, with exact lengths, for any tokenizer. Pure: no torch at import."""
