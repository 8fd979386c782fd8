"""Commands that make data and show them."""
