"""Anthropic's Messages API: ``routes`` over ``body`` and ``blocks``; ``events``."""
