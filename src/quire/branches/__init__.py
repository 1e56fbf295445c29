"""Branches: histories of which the first tokens are in the KV state. Engine and executors meet here and nowhere else."""
