"""llama-server's API: ``body`` makes completions of its requests, ``replies`` says their answers in
its fields, ``slots`` finds the sessions that are its slots; ``routes``.
"""
