"""Trains a small model whose answers depend on several documents of a prompt.

``python -m recipes.chunk_recall.train``. See README.md.
"""
