"""Weights from and to Hugging Face's format."""
