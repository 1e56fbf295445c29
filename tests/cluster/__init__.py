"""Tests of ``quire.cluster``."""
