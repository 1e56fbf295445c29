"""Draws and penalties on GPUs: ``triton_draw``, ``triton_penalties``, and their programs."""
