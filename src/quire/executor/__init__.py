"""Executors: the verbs of ``contracts.executor`` over a runner, and the KV caches that they work on."""
