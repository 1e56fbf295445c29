"""Benchmarks: Quire's speed beside the hardware's peak and a peer in the same run."""
