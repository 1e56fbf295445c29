"""What is served, as llama-server describes it."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from quire.server.http.context import Context, public_name
from quire.server.llamacpp.replies import settings_of
from quire.server.llamacpp.slots import total
from quire.server.ollama.models import capabilities, template_of
from quire.server.openai.generation import chat_defaults


def described(context: Context) -> dict[str, Any]:
    """Describe the server, its model and what a completion gets that gives no parameters."""
    tokenizer, template = context.llm.tokenizer, template_of(context)
    found = capabilities(context)
    defaults = chat_defaults(context)
    special = {} if tokenizer is None else tokenizer.special_tokens
    return {
        "default_generation_settings": {
            "id": 0,
            "id_task": -1,
            "n_ctx": context.longest,
            "speculative": context.llm.config.speculative is not None,
            "is_processing": False,
            "params": settings_of(defaults, context),
        },
        "total_slots": total(context),
        "model_alias": context.model_name,
        "model_path": public_name(context.llm.config.model),
        "chat_template": template or "",
        "chat_template_caps": {"supports_tools": "tools" in found, "supports_tool_calls": "tools" in found},
        "bos_token": special.get("bos_token", ""),
        "eos_token": special.get("eos_token", ""),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"quire-{metadata.version('quire')}",
        "is_sleeping": False,
    }
