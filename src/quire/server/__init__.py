"""The HTTP server: OpenAI's endpoints, and sessions that can be forked, rewound and saved.

``create_app`` makes the application, ``serve`` runs it. The engine steps in its own thread; the
event loop parses, waits and writes. Only this package imports the extra ``server`` (fastapi,
uvicorn, prometheus_client).
"""
