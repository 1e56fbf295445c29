"""Bodies of requests about sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from quire.base.outputs import EditMode
from quire.base.sampling_fields import Surface
from quire.base.sampling_params import SamplingParams
from quire.server.http.errors import ApiError, bad_field
from quire.server.http.foreign_fields import Table
from quire.server.openai.generation import MAX_LOGPROBS, sampling_params
from quire.server.openai.protocol import (
    Blending,
    Body,
    HintedBody,
    ParamsBody,
    ShownAs,
    StreamOptions,
    Tool,
    refuse_fields,
    takes_sampling,
)

TokenIds = list[int]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Messages = list[dict[str, Any]]
Labels = dict[str, str]

Pair = Annotated[list[int], Field(min_length=2, max_length=2)]
Span = Annotated[str | list[int], ShownAs(str | Pair)]
Prompt = str | TokenIds


class StrictBody(Body):
    """The body of a call of Quire's own, in which an unknown field is a mistake."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class CreateBody(StrictBody):
    """``POST /v1/sessions``."""

    # A sink is the beginning of a window.
    model_config = ConfigDict(
        json_schema_extra={
            "if": {"required": ["sink"], "properties": {"sink": {"exclusiveMinimum": 0}}},
            "then": {"required": ["window"], "properties": {"window": {"type": "integer"}}},
        }
    )

    model: str | None = None
    """The model's name or an adapter's; the base model if it is missing."""
    prompt: Prompt | None = None
    """Text or token ids, tokenised as for a completion; without them the session is empty."""
    messages: Messages | None = None
    """The beginning of a chat instead, up to the model's answer. Further messages continue it."""
    tools: list[Tool] | None = None
    """The tools of the chat, for its template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the template."""
    ttl: Seconds | None = None
    """Seconds without use after which the session is closed; the server's own if it is missing."""
    name: str | None = None
    """The session's name; need not be unique."""
    labels: Labels | None = None
    """Strings by strings, to find the session."""
    pin: bool = False
    """Its state stays in the pool."""
    window: int | None = None
    """Only the first ``sink`` and the last ``window - sink`` tokens are seen and kept."""
    sink: int = 0
    cache_salt: str | None = None


class TextBody(StrictBody):
    """``append`` and ``score``: one of the two."""

    text: str | None = None
    """Tokenised without BOS."""
    tokens: TokenIds | None = None

    def content(self) -> str | TokenIds:
        """Return text or tokens. Raise ``ApiError`` unless exactly one is given."""
        if (self.text is None) == (self.tokens is None):
            found = "neither" if self.text is None else "both"
            raise bad_field("text", f"text or tokens is needed, one of them; got {found}")
        return self.text if self.text is not None else self.tokens or []


class ForkBody(StrictBody):
    at: int | None = None
    """Number of tokens that the children hold; all if it is missing."""
    n: Annotated[int, Field(ge=1)] = 1
    """Number of children."""
    ttl: Seconds | None = None
    """The children's lifetime; the parent's if it is missing."""
    name: str | None = None
    """The children's name; none if it is missing."""
    labels: Labels | None = None
    """The children's labels; the parent's if they are missing."""


class RewindBody(StrictBody):
    """One of the two."""

    to: int | None = None
    """Number of tokens that are left."""
    n: int | None = None
    """Number of tokens that are removed."""


class EditBody(TextBody):
    """``edit``: ``text`` or ``tokens`` take the place of ``span``; empty ones, of nothing."""

    span: Span
    """The first position and the one behind the last, or a text that occurs once."""
    mode: EditMode = "exact"
    """What follows is run again, or blended."""
    blend: Blending = None
    """How, in the mode "blend"; true or an object."""


class CommitBody(StrictBody):
    name: str
    """The branch."""
    message: str | None = None
    force: bool = False
    """Let the branch go from where it stands, if that is no earlier state of this session."""


class CheckoutBody(StrictBody):
    branch: str
    """A branch, or 8 digits or more of a commit's id."""
    ttl: Seconds | None = None
    name: str | None = None
    """The session's name; none if it is missing."""
    labels: Labels | None = None
    """The session's labels; the commit's if they are missing."""


class AdapterBody(StrictBody):
    name: str | None
    """A loaded adapter; null: the base model."""


@takes_sampling(Surface.SESSIONS)
class SamplingBody(ParamsBody):
    """Parameters under their names in Python. The defaults say what is missing or null."""

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """Return the parameters. Raise ``ApiError`` 400 for a bad or an unsupported field."""
        self._refuse_unsupported()
        given, names = self.sampling()
        if given.get("logprobs", 0) > MAX_LOGPROBS:
            raise bad_field("logprobs", f"logprobs must be an integer in [0, {MAX_LOGPROBS}], got {given['logprobs']}")
        return sampling_params(given, defaults, names)

    def _refuse_unsupported(self) -> None:
        refuse_fields(self, UNSUPPORTED, " in a session")
        if unknown := sorted((self.model_extra or {}).keys() - UNSUPPORTED.keys()):
            raise bad_field(unknown[0], f"{unknown[0]}: there is no such field in this call")


class ContinueBody(HintedBody, SamplingBody):
    """How sessions are continued. The model's generation_config.json gives the defaults."""

    model: str | None = None
    """The model or adapter of the session, as a check."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def _refuse_unsupported(self) -> None:
        super()._refuse_unsupported()
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "stream_options is for requests with stream=true")


class GenerateBody(ContinueBody):
    """``POST /v1/sessions/{id}/generate``."""

    prompt: Prompt | None = None
    """Text (without BOS) or token ids to add before."""
    messages: Messages | None = None
    """The new messages of a chat, to be answered."""


class GenerateManyBody(ContinueBody):
    """``POST /v1/sessions/generate``."""

    ids: Annotated[list[str], Field(min_length=1)]
    """The sessions, each once."""
    each: list[SamplingBody] | None = None
    """Changes of parameters for each, in the order of ``ids``: ``[{"seed": 1}, {"seed": 2}]``."""

    def all_params(self, defaults: SamplingParams) -> list[SamplingParams]:
        """Return the parameters of each session. Raise ``ApiError`` 400 with the field's name."""
        common = self.params(defaults)
        if self.each is None:
            return [common] * len(self.ids)
        if len(self.each) != len(self.ids):
            raise bad_field("each", f"each has {len(self.each)} entries for {len(self.ids)} ids; give one for each")
        found = []
        for number, one in enumerate(self.each):
            try:
                found.append(one.params(common))
            except ApiError as error:
                where = f"each.{number}" if error.param is None else f"each.{number}.{error.param}"
                raise ApiError(error.status, error.message, param=where, code=error.code) from None
        return found


UNSUPPORTED: Table = {
    "best_of": ((1,), "fork the session, generate in each child, and choose"),
    "echo": ((False,), "GET /v1/sessions/{id} has the text before"),
    "suffix": (("",), "POST /v1/completions fills in text before a suffix"),
    "prompt_logprobs": ((), "POST /v1/sessions/{id}/score gives log-probabilities"),
    "response_format": (({"type": "text"},), "use structured_outputs"),
    "tools": (([],), "send tools to /v1/chat/completions"),
    "tool_choice": (("none",), "send tools to /v1/chat/completions"),
    "functions": ((), "send tools to /v1/chat/completions"),
    "function_call": ((), "send tools to /v1/chat/completions"),
    "cache_salt": ((), "a session is given its salt when it is made"),
    "logits_processors": (([],), "code is not taken over HTTP"),
    "session_id": ((), "the path, or ids, say which session is meant"),
    "prompt": ((), "POST /v1/sessions/{id}/append adds to one before"),
    "messages": ((), "POST /v1/sessions/{id}/generate answers them"),
}
"""Fields of other requests."""


def labels_of(texts: Sequence[str] | None) -> dict[str, str]:
    """Return the labels of a query, each "name=value". Raise ``ApiError`` 400 for other texts."""
    labels: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or name in labels:
            raise bad_field("label", f"each label must be name=value, of a name of its own; got {text[:80]!r}")
        labels[name] = value
    return labels
