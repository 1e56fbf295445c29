"""Branches: histories whose first tokens are in the KV state, used by engine and executors."""
