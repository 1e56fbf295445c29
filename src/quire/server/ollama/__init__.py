"""ollama's API: ``body`` makes chats of its requests, ``replies`` says their answers as its clients
read them, ``models`` describes what is served; ``routes``.
"""
