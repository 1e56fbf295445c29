"""OpenAI's Responses API: ``routes`` over ``body`` and ``items``; ``events``; ``store``."""
