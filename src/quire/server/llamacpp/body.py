"""The bodies of ``/completion`` and ``/infill``, and the completions that they become."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from pydantic import Field, PrivateAttr

from quire.server.http.bodies import check_count
from quire.server.http.context import Context
from quire.server.http.errors import bad_field
from quire.server.http.foreign_fields import Table
from quire.server.openai.generation import Part, chat_defaults
from quire.server.openai.protocol import Body, CompletionRequest, KvHintAction, KvHints, refuse_fields
from quire.text.tokenizer import Tokenizer

RANDOM_SEED = 0xFFFFFFFF
"""llama.cpp's other seed without effect, besides -1."""
BANNED = -100.0
"""The bias of a token that is not to be drawn: the lowest that is taken."""

UNSUPPORTED: Table = {
    "n_cache_reuse": ((0,), "POST /v1/completions takes segments, and blend"),
    "sse_ping_interval": ((-1,), "no pings are sent"),
    "session_id": ((), "give id_slot, or send it to POST /v1/completions"),
    "suffix": (("",), "POST /infill fills in text before a suffix"),
    "echo": ((False,), "the answer has the prompt by itself"),
    "logprobs": ((), "use n_probs"),
    "return_token_ids": ((False,), "use return_tokens"),
    "return_tokens_as_token_ids": ((False,), "the answer names tokens by id anyway"),
    "kv_hints": ((), "send them to POST /v1/completions"),
}
"""Fields that these calls refuse, besides those that all completions refuse."""


class LlamaBody(CompletionRequest):
    """``POST /completion``."""

    n_probs: int | None = None
    """Log-probabilities of each token, and of so many of the most likely ones."""
    n_cmpl: int | None = None
    """Samples per prompt."""
    logit_bias: Any = None
    """``[[token or text, number or false], ...]``, or an object of these."""
    id_slot: int | None = None
    """The slot that keeps the state of prompt and answer; -1: none."""
    cache_prompt: bool | None = None
    """False: all of the prompt is computed."""
    return_tokens: bool | None = None
    response_fields: list[str] | None = None
    """The fields of the answer, of which a/b is b within a; all without them."""
    _no_answer: bool = PrivateAttr(default=False)

    def sampling(self) -> tuple[dict[str, Any], dict[str, str]]:
        given, names = super().sampling()
        for own, name in (("logprobs", "n_probs"), ("n", "n_cmpl")):
            if (value := getattr(self, name)) is not None:
                names[own] = name
                if value or name == "n_cmpl":
                    given[own] = value
        if given.get("seed") == RANDOM_SEED:
            del given["seed"]
        return given, names

    @property
    def slot(self) -> int | None:
        """Return the number of the slot; None for none."""
        return None if self.id_slot in (None, -1) else self.id_slot

    @property
    def no_answer(self) -> bool:
        """Whether the prompt is only to be computed: ``n_predict`` was 0."""
        return self._no_answer


class ExtraFile(Body):
    """Another file of the repository."""

    filename: str = "tmp"
    text: str


class InfillBody(LlamaBody):
    """``POST /infill``."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] = Field(default_factory=list)
    prompt: str = ""
    """The beginning of the text between, behind the prefix."""


class SlotBody(Body):
    """``POST /slots/{id_slot}``."""

    filename: str | None = None
    """The branch that has the state."""


def completion_of(context: Context, body: LlamaBody) -> LlamaBody:
    """Return a body in the terms of ``/v1/completions``. Raise ``ApiError`` 400 for fields that are
    not taken."""
    given = {name: getattr(body, name, None) for name in UNSUPPORTED if name in body.model_fields_set}
    refuse_fields(Body.model_validate({**(body.model_extra or {}), **given}), UNSUPPORTED)
    changes: dict[str, Any] = {}
    extra = dict(body.model_extra or {})
    asked, _ = body.sampling()
    if isinstance(stop := asked.get("stop"), list):
        changes["stop"] = [text for text in stop if text] or None
    if body.logit_bias is not None:
        changes["logit_bias"] = _biases(context.llm.tokenizer, body.logit_bias)
    limit = next(
        (extra[name] for name in ("n_predict", "num_predict") if extra.get(name) is not None), asked.get("max_tokens")
    )
    if limit is None:
        # Without a limit llama-server goes on to the end of the context, and completions do not.
        extra["n_predict"] = chat_defaults(context).max_tokens or -1
    elif limit == 0:
        extra = {name: value for name, value in extra.items() if name not in ("n_predict", "num_predict")}
        changes |= {"max_tokens": 1, "stream": False}
        if body.slot is None:
            action = KvHintAction(action_id="n_predict", action_type="kv.prefetch", action_version="1")
            changes["kv_hints"] = KvHints(protocol_version="0.1", message_id="n_predict", actions=[action])
            changes["max_tokens"] = 0
    if body.cache_prompt is False:
        changes["cache_salt"] = secrets.token_hex(16)
    made = body.model_copy(update=changes)
    made.__pydantic_extra__, made._no_answer = extra, limit == 0
    return made


def prompts_of(prompt: Any) -> list[Sequence[Part]]:
    """Return the parts of one prompt or many. Raise ``ApiError`` 400 with the place of a bad
    one."""
    if not isinstance(prompt, list):
        return [_parts(prompt, "prompt")]
    kinds = {type(one) for one in prompt}
    if kinds == {int} or kinds == {int, str}:
        return [_parts(prompt, "prompt")]
    check_count("prompt", prompt)
    if not prompt:
        raise bad_field("prompt", "prompt is an empty list; give text, token ids, or a list of either")
    return [_parts(one, f"prompt.{number}") for number, one in enumerate(prompt)]


def _parts(prompt: Any, where: str) -> list[Part]:
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise bad_field(
                f"{where}.multimodal_data", "multimodal_data is not supported: only text is taken", code="unsupported"
            )
        prompt = prompt.get("prompt_string")
    if isinstance(prompt, str) and prompt:
        return [prompt]
    if isinstance(prompt, list) and prompt and {type(one) for one in prompt} <= {int, str}:
        parts: list[Part] = []
        for kind, group in groupby(prompt, type):
            pieces = list(group)
            parts += [one for one in pieces if one] if kind is str else [pieces]
        if parts:
            return parts
    raise bad_field(where, f"{where} must be text, or a list of token ids and texts, not empty; got {prompt!r:.60}")


def _biases(tokenizer: Tokenizer | None, given: Any) -> dict[str, float]:
    """Return biases by token ids, each of a text's tokens under its own."""
    if isinstance(given, Mapping):
        pairs = [(int(key) if key.isascii() and key.isdigit() else key, bias) for key, bias in given.items()]
    elif isinstance(given, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in given):
        check_count("logit_bias", given)
        pairs = [(key, bias) for key, bias in given]
    else:
        raise bad_field("logit_bias", f"logit_bias must be pairs [token, bias], got {given!r:.60}")
    found: dict[str, float] = {}
    for key, bias in pairs:
        value = BANNED if bias is False else bias
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise bad_field("logit_bias", f"each bias of logit_bias must be a number or false, got {bias!r:.60}")
        if isinstance(key, str) and tokenizer is not None:
            found |= {str(one): value for one in tokenizer.encode_inside(key)}
        elif type(key) is int:
            found[str(key)] = value
        else:
            raise bad_field("logit_bias", f"each token of logit_bias must be an id or a text, got {key!r:.60}")
    return found
