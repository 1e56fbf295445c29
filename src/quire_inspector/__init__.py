"""The inspector: pages, drawings and traces of a running engine, of state files and of stores.

It reads and changes nothing. ``views``: readings of an engine as documents. ``drawing``: values in
notebooks and terminals. ``routes``: HTTP. ``files``: state files and stores without a model.
``top``, ``trace``: a server in the terminal. ``page/``: static files. Quire imports it only inside
of functions that a user calls; ``contracts.views`` declares the documents.
"""
