"""State outside of the pool: objects by keys of their tokens, in tiers.

``keys``, ``objects``, ``records``: what is kept, and under which name. ``memory``, ``files``,
``redis``, ``remote``: tiers; ``stack`` over ``tier_guard``: all tiers as one. ``commits``,
``history``, ``collection``, ``transfer``: branches in a store. ``journal``: sessions that outlive
the process.
"""
