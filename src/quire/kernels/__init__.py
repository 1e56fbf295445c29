"""Fast versions of the operations in ``ops``; each has a reference there with the same
signature."""
