"""A sampling field is declared in one place: checks, HTTP bodies, options and model defaults
follow.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import InvalidArgument, SamplingParams
from quire.base import sampling_params
from quire.base.sampling_fields import Surface, declarations_on

ADDED = """
    swing: float | None = declared(
        None, number(0.0, 1.0), "How far it swings.", on=_ALL, names={Surface.CHATS: "top_swing"}, alias="old_swing"
    )
"""
BEFORE = "    temperature: float = declared("

PROBE = """
import sys
from importlib.util import spec_from_file_location

class Changed:
    def find_spec(self, name, path=None, target=None):
        return spec_from_file_location(name, sys.argv[1]) if name == "quire.base.sampling_params" else None

sys.meta_path.insert(0, Changed())

import typer
from quire import SamplingParams
from quire.cli import main as cli
from quire.base.errors import InvalidArgument
from quire.server.http.errors import ApiError
from quire.server.openai.generation import sampling_params
from quire.server.openai.protocol import ChatRequest, CompletionRequest
from quire.server.sessions.bodies import GenerateBody, GenerateManyBody

assert SamplingParams(swing=1).swing == 1.0
assert SamplingParams().swing is None
try:
    SamplingParams(swing=2)
except InvalidArgument as error:
    assert str(error) == "swing must be a number in [0, 1], got 2", error
else:
    raise AssertionError("2 was taken")
assert SamplingParams.from_generation_config({"swing": 0.5}).swing == 0.5

bodies = [(CompletionRequest, "swing", {}), (ChatRequest, "top_swing", {"messages": []}), (GenerateBody, "swing", {})]
for body, name, rest in bodies:
    described = body.model_json_schema()["properties"][name]
    assert described["description"] == "How far it swings."
    assert described["anyOf"] == [{"type": "number", "minimum": 0.0, "maximum": 1.0}, {"type": "null"}]
    for given in (name, "old_swing"):
        values, fields = body(**rest, **{given: 0.25}).sampling()
        assert sampling_params(values, SamplingParams(), fields).swing == 0.25
    values, fields = body(**rest, **{name: 2}).sampling()
    try:
        sampling_params(values, SamplingParams(), fields)
    except ApiError as error:
        assert (error.status, error.param) == (400, name)
    else:
        raise AssertionError(f"{body} took 2")
both = GenerateManyBody(ids=["a", "b"], swing=0.25, each=[{}, {"swing": 0.75}])
assert [params.swing for params in both.all_params(SamplingParams())] == [0.25, 0.75]

for name in ("generate", "chat"):
    options = {option.name: option for option in typer.main.get_command(cli.app).commands[name].params}
    assert (options["swing"].opts, options["swing"].help) == (["--swing"], "How far it swings.")
"""


@pytest.mark.slow
def test_a_field_is_declared_once(tmp_path: Path) -> None:
    """Its declaration is put into the source of ``SamplingParams``, and nothing else changes."""
    text = Path(sampling_params.__file__).read_text()
    assert text.count(BEFORE) == 1
    changed = tmp_path / "sampling_params.py"
    changed.write_text(text.replace(BEFORE, ADDED + BEFORE))
    done = subprocess.run([sys.executable, "-c", PROBE, str(changed)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("surface", "has", "lacks"),
    [
        (Surface.COMPLETIONS, {"logprobs", "prompt_logprobs", "max_completion_tokens"}, {"top_logprobs"}),
        (Surface.CHATS, {"top_logprobs", "prompt_logprobs", "max_completion_tokens"}, {"logprobs"}),
        (Surface.SESSIONS, {"logprobs", "max_completion_tokens"}, {"prompt_logprobs"}),
        (Surface.COMMAND, {"stop", "seed"}, {"n", "logprobs", "max_completion_tokens"}),
        (
            Surface.EXECUTORS,
            {"temperature", "logit_bias", "seed", "max_tokens"},
            {"n", "stop", "min_tokens", "logprobs"},
        ),
        (Surface.GENERATION_CONFIG, {"max_new_tokens", "top_p"}, {"max_tokens", "seed", "max_completion_tokens"}),
    ],
)
def test_names_on_surfaces(surface: Surface, has: set[str], lacks: set[str]) -> None:
    found = declarations_on(SamplingParams, surface)
    assert has <= set(found)
    assert not (lacks | {"logits_processors"}) & set(found)
    assert all(declaration.help for _, declaration in found.values())


@pytest.mark.parametrize(
    ("name", "value"), [("beam_width", 0), ("max_tokens", 0), ("early_stopping", "soon"), ("stop", "")]
)
def test_beams_are_checked_by_their_declarations(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name} must be"):
        sampling_params.BeamSearchParams(**{"beam_width": 2, name: value})
