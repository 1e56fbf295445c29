"""The HTTP server: OpenAI's and Anthropic's endpoints, and sessions to fork, rewind and save.

``create_app`` makes the application, ``serve`` runs it. The engine steps in its own thread; the
event loop parses, waits and writes. Only this package imports the extra ``server`` (fastapi,
uvicorn, prometheus_client).
"""
