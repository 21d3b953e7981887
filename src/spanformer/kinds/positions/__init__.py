"""One spec per position encoding."""
