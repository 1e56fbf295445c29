"""Structured output: tokens that keep a text in a requested form, over llguidance.

``formats``: a requested format as a grammar. ``schema_guard`` over ``schema_nodes``: JSON schemas
that llguidance would get wrong. ``matcher``, ``grammars``: masks for requests. ``trial``,
``slow_masks``: grammars that take long, in a child process and beside the engine.
"""
