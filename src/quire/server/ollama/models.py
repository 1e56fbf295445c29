"""What is served, as ollama describes models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from quire.base.errors import InvalidArgument
from quire.server.http.context import Context
from quire.server.http.status import model_cards
from quire.server.tools.harmony import is_harmony
from quire.server.tools.reasoning import reasoning_for
from quire.server.tools.tools import parser_for
from quire.text.chat_rendering import select_template
from quire.text.fill_middle import FillTokens


def moment(seconds: float) -> str:
    """Return a Unix time as ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


async def listed(context: Context) -> list[dict[str, Any]]:
    """Return the model and its adapters."""
    changed, details = moment(context.started), _details(context)
    return [
        {
            "name": one.id,
            "model": one.id,
            "modified_at": changed,
            "size": context.llm.model.parameter_bytes,
            "digest": "",
            "details": details,
        }
        for one in await model_cards(context)
    ]


def described(context: Context, name: str) -> dict[str, Any]:
    kind = str(context.llm.model.config.get("model_type") or "unknown")
    template = template_of(context)
    info = {
        "general.architecture": kind,
        "general.parameter_count": context.llm.model.num_parameters,
        f"{kind}.context_length": context.longest,
        f"{kind}.vocab_size": context.llm.engine.checks.vocab_size,
    }
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": "",
        "template": template or "",
        "details": _details(context),
        "model_info": info,
        "capabilities": capabilities(context),
        "modified_at": moment(context.started),
    }


def capabilities(context: Context) -> list[str]:
    """Return the names of the kinds of requests that the model is made for."""
    found = ["completion"]
    if FillTokens.of(context.llm.tokenizer) is not None:
        found.append("insert")
    config, template = context.llm.model.config, template_of(context)
    if template is None:
        return found
    parser = context.settings.tool_call_parser
    if is_harmony(template, parser) or parser_for(config, template, parser) is not None:
        found.append("tools")
    if is_harmony(template, parser) or reasoning_for(template) is not None:
        found.append("thinking")
    return found


def template_of(context: Context) -> str | None:
    tokenizer = context.llm.tokenizer
    if tokenizer is None:
        return None
    try:
        return select_template(tokenizer.chat_templates)
    except InvalidArgument:
        return None


def _details(context: Context) -> dict[str, Any]:
    kind = str(context.llm.model.config.get("model_type") or "unknown")
    count = context.llm.model.num_parameters
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    return {
        "parent_model": "",
        "format": "gguf" if context.model_name.endswith(".gguf") else "safetensors",
        "family": kind,
        "families": [kind],
        "parameter_size": size,
        "quantization_level": ", ".join(context.llm.model.formats) or "unknown",
    }
