"""State outside of the pool: keys, objects, and the tiers that keep them (``docs/store.md``)."""
