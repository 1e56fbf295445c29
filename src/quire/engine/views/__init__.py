"""Readers of an engine for those who look at it."""
