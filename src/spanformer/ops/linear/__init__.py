"""Attention with a recurrent state."""
