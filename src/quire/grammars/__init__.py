"""Structured output: tokens that keep a text in a requested form, over llguidance.

``formats``: a requested format as a grammar. ``schema_guard`` over ``schema_nodes``: JSON schemas
that llguidance would get wrong. ``matcher``, ``grammars``: masks for requests. ``trial``: grammars
that take long to compile, in a child process.
"""
