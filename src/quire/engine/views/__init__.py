"""Readers of the state, for whoever looks at it."""
