"""Converts checkpoints of other code into models of ours."""
