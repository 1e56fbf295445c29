"""The command line: ``quire`` and its commands.

``main``: all commands; ``options``: what they share. ``chat``: a conversation in the terminal.
``state``, ``inspection``, ``store_tables``: what files and stores hold. ``doctor``, ``rates``,
``watch``, ``bench``.
"""
