"""Blending of cached K and V: which rows run, where keys go, what attention reads."""
