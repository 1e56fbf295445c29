"""Conversations of the page at ``/``: documents that its windows share. ``store``, ``routes``."""
