"""Benchmarks: what Quire does, what the hardware could do, what a peer does in the same run."""
