"""Runners: execute one ``Step`` and return logits. They wrap each other (graphs, ranks)."""
