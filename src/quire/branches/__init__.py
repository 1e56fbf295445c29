"""Branches: a history of tokens of which the first ``computed`` are in the KV state.

``branch``: the value. ``replay_needs``: tokens that must run again to go back. ``prefix_cache``
over ``prefix_tree``: beginnings that prompts share. ``tiers``, ``stored_state`` over
``state_keys``, ``stored_match``, ``state_loads``, ``object_writer``: branches outside of the pool.
``saved_rows``: state files.
"""
