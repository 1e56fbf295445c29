"""Readers of a running engine's state, for pages, pictures and traces. They change nothing."""
