"""The table of model types in the documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from quire.base.errors import QuireError
from quire.models.families import FAMILIES, family_of
from quire.models.model_types import types_table
from quire.models.spellings import usual_values
from quire.models.text_parts import IMAGE_TEXT

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
WITHOUT_SIZES = {"deepseek_v2": "num_experts_per_tok is None", "lfm2_moe": "layer_types is None"}
"""Types whose configuration in transformers has no default of a field that a model needs."""


def rows() -> dict[tuple[str, str], str]:
    """Return the states of the table on the page, by model type and architecture."""
    found = re.findall(r"^\| ([\w.-]+) \| (\w+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    return {(name, kind): state for name, kind, state in found}


def test_the_page_has_what_the_command_prints() -> None:
    """``quire models --markdown``, of the installed ``transformers``."""
    assert PAGE.read_text().endswith(types_table())


def test_the_table_is_whole() -> None:
    found = rows()
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()}
    assert set(found) == known
    for (_, kind), state in found.items():
        assert state.startswith("native") == (kind in FAMILIES)
        assert (state == "text part") == (kind in IMAGE_TEXT)
        assert re.fullmatch(
            r"native(, text part)?|text part|fallback(, with max_model_len .{8,})?|refused: .{8,}", state
        )
    assert set(IMAGE_TEXT) <= {kind for _, kind in known}


def test_rows_of_the_table_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    """Each ``model_type`` that the table calls native, or a text part, with its defaults."""
    read = [row for row, state in rows().items() if not state.startswith(("refused", "fallback"))]
    assert len(read) > 70
    for model_type, architecture in read:
        config = CONFIG_MAPPING[model_type]()
        config.architectures = [architecture]
        config.save_pretrained(tmp_path)
        values = usual_values(json.loads((tmp_path / "config.json").read_text()))
        if model_type in WITHOUT_SIZES:
            with pytest.raises(QuireError, match=WITHOUT_SIZES[model_type]):
                family_of(values).read_config(values)
        else:
            assert family_of(values).read_config(values).num_layers
