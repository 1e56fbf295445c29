"""Drawings of values for notebooks, terminals and matplotlib.

``pictures``: the interface; ``painters``: which picture a value has. ``heat``, ``chances``,
``page_maps``, ``branch_tree``, ``summaries``: pictures. ``shown_text``: texts without markup.
"""
