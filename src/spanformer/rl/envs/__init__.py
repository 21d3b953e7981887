"""Environments: batches of rows that step together, and the same ones for gymnasium."""
