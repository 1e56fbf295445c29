"""Runners execute one ``Step`` and return logits. A runner may wrap another one (graphs, ranks)."""
