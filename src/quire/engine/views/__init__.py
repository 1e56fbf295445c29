"""Readers of a running engine, for pages, pictures and traces. They change nothing."""
