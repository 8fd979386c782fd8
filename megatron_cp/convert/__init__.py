"""Convert weights from and to Hugging Face's format."""
