"""State files and stores as documents of the page, without a model.

``file_snapshot``, ``store_snapshot`` over ``snapshot``: readings. ``stored_norms``: norms of stored
tensors. ``known_tokenizers``: texts of tokens. ``snapshot_server``: the page on this machine.
"""
