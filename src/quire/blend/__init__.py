"""Blending of cached K and V (``docs/blend.md``)."""
