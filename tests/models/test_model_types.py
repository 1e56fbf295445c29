"""The table of model types in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from quire.models.families import FAMILIES
from quire.models.model_types import types_table
from quire.models.text_parts import IMAGE_TEXT

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_has_what_the_command_prints() -> None:
    """``quire models --markdown``, of the installed ``transformers``."""
    assert PAGE.read_text().endswith(types_table())


def test_the_table_is_whole() -> None:
    rows = re.findall(r"^\| ([\w.-]+) \| (\w+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    found = {(name, kind): state for name, kind, state in rows}
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()}
    assert set(found) == known
    for (_, kind), state in found.items():
        assert state.startswith("native") == (kind in FAMILIES)
        assert (state == "text part") == (kind in IMAGE_TEXT)
        assert re.fullmatch(
            r"native(, text part)?|text part|fallback(, with max_model_len .{8,})?|refused: .{8,}", state
        )
    assert set(IMAGE_TEXT) <= {kind for _, kind in known}
