"""Real models: `make test-real DIR=...`, where DIR holds ``NAME.gguf`` and ``NAME/``.

``python -m tests.real.fetch DIR`` writes both.
"""
