"""Converts checkpoints of other code into spanformer models."""
