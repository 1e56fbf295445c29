"""What Quire does with each ``model_type`` that ``transformers`` knows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from quire.base.errors import QuireError, Unsupported
from quire.models.fallback import chunk_length, first_line, refuse_attention, refuse_other_kinds
from quire.models.families import FAMILIES
from quire.models.text_parts import IMAGE_TEXT, TEXT_TYPES


class TypeState(NamedTuple):
    """A row of the table."""

    model_type: str
    architecture: str
    state: str
    """"native", "text part", "fallback", which may have a limit, or "refused" with the reason."""


def type_states() -> Iterator[TypeState]:
    """Yield the state of every causal and image-text ``model_type`` of the installed
    ``transformers``. ``Unsupported`` if it is not installed."""
    try:
        from transformers.models.auto import modeling_auto
    except ImportError as error:
        raise Unsupported("the table of model types needs transformers, which is not installed") from error
    causal: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    images: Any = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    rows = dict.fromkeys(images.items(), True) | dict.fromkeys(causal.items(), False)
    for (name, kind), reads_images in sorted(rows.items()):
        yield TypeState(name, kind, _state(name, kind, reads_images=reads_images))


def _state(model_type: str, architecture: str, *, reads_images: bool) -> str:
    if architecture in FAMILIES:
        return "native" if architecture.endswith("ForCausalLM") else "native, text part"
    if architecture in IMAGE_TEXT:
        return "text part"
    import transformers

    try:
        config = transformers.CONFIG_MAPPING[model_type]()
        text = config.get_text_config(decoder=True).model_type
    except Exception as error:  # A class of transformers raises anything.
        return f"refused: its configuration has no defaults ({type(error).__name__}: {_plain(first_line(error))})"
    if reads_images:
        if text in TEXT_TYPES:
            return f"refused: its image encoder changes the layers of its text part, {text}"
        return f"refused: it reads images, and its text part, {text}, is not native"
    try:
        what = repr(architecture)
        refuse_other_kinds(config, what, architecture)
        refuse_attention(getattr(transformers, architecture), what)
    except QuireError as error:
        return f"refused: {_plain(str(error)).removeprefix(f'architecture {what} ').removeprefix(f'architecture {what}: ')}"
    return "fallback" if chunk_length(config) is None else "fallback, with max_model_len up to attention_chunk_size"


def _plain(text: str) -> str:
    return re.sub(r"[|<>`\s]+", " ", text).strip()


def types_table() -> str:
    """Return ``type_states`` as a table in Markdown."""
    import transformers

    rows = [*type_states()]
    lines = [
        f"Of transformers {transformers.__version__}: {len(rows)} architectures of causal and image-text models.",
        "",
        "| `model_type` | architecture | state |",
        "|---|---|---|",
        *(f"| {row.model_type} | {row.architecture} | {row.state} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"
