"""Runners: ``execute(step)`` returns logits.

``local``: one model, one state, one process. ``graph``: captured decodes. ``reclaim``: who gives up
pages, and in which order. ``pool_budget``, ``memory_profile``: how much memory the pools get.
"""
