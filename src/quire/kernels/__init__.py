"""Fast versions of the operations in ``ops``; each has its reference there, with the same signature."""
