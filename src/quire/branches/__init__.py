"""Branches: a history of tokens of which the first ``computed`` are in the KV state.

``branch``: the value. ``extension``: how engine and executor extend branches, and what counts of
it. ``owner``: their sequences, forked, cut and taken back, and what going back runs again.
``session_branch``, ``session_branches``: branches that outlive a request. ``prefix_cache``:
beginnings that prompts share. ``stored_state`` over ``state_keys``, ``stored_match``,
``state_loads``, ``object_writer``: branches outside of the state. ``saved_rows``: state files.
"""
