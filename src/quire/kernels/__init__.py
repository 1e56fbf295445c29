"""Fast versions of operations in ``ops``; each has a reference there with its signature."""
