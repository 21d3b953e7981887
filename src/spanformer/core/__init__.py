"""What every room needs: atomic files, process memory, the processor. It imports nothing of ours."""
