"""Shared by all rooms: atomic files, process memory, the processor, progress. Imports no other room."""
