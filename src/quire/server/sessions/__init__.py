"""Sessions over HTTP: ``routes`` over ``bodies``; ``held``: owners and lifetimes; ``streams``,
``batches``: generations; ``files``: state files; ``keeper``: what is there after a restart.
"""
