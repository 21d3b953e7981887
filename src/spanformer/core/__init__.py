"""What every room needs: atomic files, process memory, the processor, progress. It imports nothing of ours."""
