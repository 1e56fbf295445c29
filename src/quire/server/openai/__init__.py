"""OpenAI's completions and chats, with vLLM's fields.

``protocol``: bodies. ``generation``: parameters, prompts and streams. ``chat``, ``completions``:
routes; ``replies``: their answers. ``tokens``, ``warm_routes``, ``adapter_routes``: the endpoints
beside.
"""
