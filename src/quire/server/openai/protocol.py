"""The bodies of completions and chat requests, as OpenAI and vLLM have them.

Types are checked strictly: ``"5"`` and ``true`` are no integers. ``SamplingParams`` checks ranges.
A null field counts as absent. Unknown fields are tolerated, but fields of other servers that this
one does not act upon are refused by name (``refuse_unsupported``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field, GetJsonSchemaHandler, TypeAdapter, create_model
from pydantic_core import CoreSchema

from quire.base.sampling_fields import Surface, declarations_on
from quire.base.sampling_params import SamplingParams
from quire.base.segments import BlendParams
from quire.server.http.bodies import BoundedModel
from quire.server.http.errors import bad_field, unsupported
from quire.server.http.foreign_fields import RENAMED, UNLIMITED, Table, asks_nothing, refused_in, rename


class ShownAs:
    """The description of a field that pydantic does not check, for ``/openapi.json``."""

    def __init__(self, kind: Any) -> None:
        self._adapter = TypeAdapter[Any](kind)

    def __get_pydantic_json_schema__(self, _: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(self._adapter.core_schema)


class Body(BoundedModel):
    """A body that keeps unknown fields for ``refuse_unsupported``."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class PromptPart(Body):
    type: Literal["text"] = "text"
    text: str = ""
    tokens: list[int] = Field(default_factory=list)
    segment: bool = False

    model_config = ConfigDict(extra="forbid")


Prompt = Annotated[Any, ShownAs(str | list[int] | list[str] | list[list[int]] | list[PromptPart])]
Blending = Annotated[Any, ShownAs(bool | BlendParams | None)]
GuidedJson = Annotated[Any, ShownAs(dict[str, Any] | str | None)]


class ParamsBody(Body):
    """A body with the fields that ``SamplingParams`` declares for its surface."""

    surface: ClassVar[Surface]

    def sampling(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the parameters that are given, and the body's name of every parameter. Of two
        names of one parameter the second counts: ``max_completion_tokens``, not ``max_tokens``."""
        given: dict[str, Any] = {}
        names: dict[str, str] = {}
        for name, (field, _) in declarations_on(SamplingParams, self.surface).items():
            value = getattr(self, name, None)
            if value is not None:
                given[field], names[field] = value, name
            names.setdefault(field, name)
        return given, names


B = TypeVar("B", bound=ParamsBody)


def takes_sampling(surface: Surface, without: Collection[str] = ()) -> Callable[[type[B]], type[B]]:
    """Give a body the fields that ``SamplingParams`` declares for ``surface``, but some."""

    def decorate(body: type[B]) -> type[B]:
        fields: dict[str, Any] = {}
        for name, (_, found) in declarations_on(SamplingParams, surface).items():
            if name in without:
                continue
            kind = found.kind.json | None
            # 0 tokens are taken beside ``echo`` and by a prefetch.
            if found.kind.bounds is not None and "max_" not in name:
                described = Field(json_schema_extra=dict(found.kind.bounds))
                kind = Annotated[found.kind.json, described] | None
            if isinstance(found.kind.json, UnionType):
                # pydantic's errors name the branches; ``SamplingParams`` refuses in one sentence.
                kind = Annotated[Any, ShownAs(kind)]
            fields[name] = (kind, Field(default=None, description=found.help))
        made = create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **fields)
        made.surface = surface
        return made

    return decorate


class StreamOptions(Body):
    include_usage: bool | None = None
    """Add a last chunk without choices that has the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """Add the usage so far to every chunk."""


class JsonSchemaFormat(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = None
    strict: bool | None = None
    """The schema is enforced in either case."""

    model_config = ConfigDict(strict=True, extra="allow", alias_generator=lambda name: name.rstrip("_"))


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """llama.cpp's place of the schema, also of a ``json_object``."""


class KvHintAction(Body):
    """One action of an envelope. ``quire.server.openai.hint_fields`` reads the payload."""

    action_id: str = Field(min_length=1, max_length=512)
    action_type: str = Field(min_length=1, max_length=64)
    action_version: str
    payload: dict[str, Any] = Field(default_factory=dict)


class KvHints(Body):
    """The envelope of hints that vLLM and SGLang share."""

    protocol_version: str
    message_id: str
    actions: list[KvHintAction] = Field(max_length=64)


class HintedBody(Body):
    """The fields with which a request says how its state is wanted."""

    priority: int | None = None
    """Lower values run earlier; 0 if it is missing."""
    kv_hints: KvHints | None = None
    """What to keep in the pool, to give up, or to bring there."""
    cache_control: dict[str, Any] | None = None
    """Anthropic's mark: keep the state of the whole prompt for ``ttl``, "5m" or "1h"."""


class GenerationBody(HintedBody, ParamsBody):
    """The fields that both kinds of request have."""

    model: str | None = None
    """The model's name or an adapter's; the base model if it is missing."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Accepted without effect, as are the next ones."""
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    verbosity: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    response_format: ResponseFormat | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    blend: Blending = None
    """Use the state that segments of the prompt have by themselves: approximate. True, or how."""
    regex: str | None = None
    """SGLang's name of the form ``regex``."""
    ebnf: str | None = None
    """SGLang's name of the form ``grammar``."""
    timings_per_token: bool | None = None
    """llama.cpp's: the last chunk has ``timings``, and with true each one."""
    return_token_ids: bool | None = None
    """vLLM's: choices have ``token_ids``, and the prompt's are in ``prompt_token_ids``."""
    return_tokens_as_token_ids: bool | None = None
    """vLLM's: log-probabilities name tokens "token_id:N"."""
    return_progress: bool | None = None
    """llama.cpp's: chunks before the first token tell how far the prompt is."""
    grammar: str | None = None
    """llama.cpp's name of it, as is the next one of the form ``json``."""
    json_schema: GuidedJson = None
    guided_json: GuidedJson = None
    """vLLM's earlier name of the form ``json``, as are the next ones of others."""
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    guided_whitespace_pattern: str | None = None
    """The option ``whitespace_pattern`` beside ``guided_json`` or ``guided_json_object``."""

    def form(self) -> tuple[str, dict[str, Any]] | None:
        """Return the form that one of these fields gives, after the field's name. Raise
        ``ApiError`` 400 for several."""
        given = {name: value for name in FORM_FIELDS if (value := getattr(self, name)) is not None}
        for name, nothing in (("guided_json_object", False), ("grammar", "")):
            if given.get(name) == nothing:
                del given[name]
        if len(given) > 1:
            raise bad_field(next(iter(given)), f"{' and '.join(given)} each give a form; give one of them")
        pattern = self.guided_whitespace_pattern
        options = {} if pattern is None else {"whitespace_pattern": pattern}
        for name, value in given.items():
            return name, {FORM_FIELDS[name]: value, **options}
        if options:
            raise bad_field("guided_whitespace_pattern", "guided_whitespace_pattern is for guided_json; give that too")
        return None


FORM_FIELDS = {
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
}
"""Forms of structured outputs by the names that other servers have for them."""


@takes_sampling(Surface.COMPLETIONS)
class CompletionRequest(GenerationBody):
    """``POST /v1/completions``."""

    prompt: Prompt = None
    """Text, token ids, or a list of texts or of lists of token ids; or one prompt as a list of
    parts, each with ``text`` or ``tokens``, and with ``segment`` true for what comes in other
    prompts too. A session needs none."""
    echo: bool | None = None
    """Begin the text and log-probabilities with the prompt. ``max_tokens`` may then be 0."""
    suffix: str | None = None
    """The text behind what is generated, for models that were trained to fill in the middle."""


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments."""
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class Reasoning(Body):
    effort: str | None = None
    enabled: bool | None = None

    model_config = ConfigDict(strict=True, extra="forbid")


@takes_sampling(Surface.CHATS)
class ChatRequest(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(json_schema_extra={"minItems": 1})]
    """Each ``{"role": ..., "content": text or text parts, ...}``."""
    logprobs: bool | None = None
    """Return log-probabilities of the tokens, and of ``top_logprobs`` others."""
    tools: list[Tool] | None = None
    tool_choice: Annotated[Any, ShownAs(Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None)] = None
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    reasoning_effort: str | None = None
    """A variable of the template, which must read it."""
    reasoning: Reasoning | None = None
    """The same under other names."""
    enable_thinking: bool | None = None
    """Whether the model is to think before it answers, if its template can tell it."""
    documents: list[dict[str, Any]] | None = None
    """A variable of the template."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Go on with the last message, the beginning of an answer; the answer is what follows it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template, such as ``{"enable_thinking": false}``."""


CHATS_ONLY: Table = {
    "messages": ((), "POST /v1/chat/completions has it"),
    "tools": (([],), "POST /v1/chat/completions has it"),
    "tool_choice": (("none", "auto"), "POST /v1/chat/completions has it"),
    "documents": (([],), "POST /v1/chat/completions has it"),
    "chat_template_kwargs": (({},), "a chat template has it, and POST /v1/chat/completions uses one"),
    "top_logprobs": ((0,), "give logprobs, the number"),
}
"""Fields of chats that change an answer, and completions have not."""
COMPLETIONS_ONLY: Table = {
    "prompt": (("", []), "POST /v1/completions has it; give messages"),
    "echo": ((False,), "POST /v1/completions has it"),
    "suffix": (("",), "POST /v1/completions has it"),
}
"""The reverse."""


def refuse_unlisted(body: ParamsBody, own: Table) -> None:
    """Raise ``ApiError`` 400 for a field with an effect that completions, chats or other servers
    have and ``body`` does not. ``own``: its table of fields that are refused with other advice."""
    renamed = {
        other: (UNLIMITED, own["max_completion_tokens"][1]) if name == "max_tokens" else ((), f"give {name}")
        for other, name in RENAMED.items()
    }
    forms: Table = dict.fromkeys(FORM_FIELDS, ((False, ""), "give structured_outputs"))
    usual: Table = {
        "best_of": ((1,), "an answer is one text"),
        "add_special_tokens": ((False,), "the template decides"),
        "add_generation_prompt": ((True,), "POST /v1/chat/completions has it"),
        "continue_final_message": ((False,), "POST /v1/chat/completions has it"),
        "enable_thinking": ((), "give chat_template_kwargs"),
        **dict.fromkeys(
            ("return_token_ids", "return_tokens_as_token_ids"), ((False,), "POST /v1/chat/completions has it")
        ),
    }
    refuse_fields(body, {**refused_in(body.sampling()[0]), **usual, **renamed, **forms, **COMPLETIONS_ONLY, **own})


def refuse_fields(body: Body, known: Table, where: str = "") -> None:
    """Raise ``ApiError`` 400 for a field in a table like ``UNSUPPORTED`` with an effect."""
    extra = body.model_extra or {}
    for name, (harmless, advice) in known.items():
        value = extra.get(name)
        if not asks_nothing(value, harmless):
            raise bad_field(name, f"{name} is not supported{where}: {advice}", code="unsupported_parameter")


def refuse_unsupported(body: GenerationBody) -> None:
    """Raise ``ApiError`` 400 for a field that would be ignored otherwise."""
    # A template writes the special tokens of a chat, the tokenizer adds those of a plain prompt.
    given, names = body.sampling()
    rename(body.model_extra or {}, given, names)
    is_chat = isinstance(body, ChatRequest)
    usual = {"best_of": (given.get("n") or 1,), "add_special_tokens": (not is_chat,)}
    known = {**refused_in(given), **(COMPLETIONS_ONLY if is_chat else CHATS_ONLY)}
    refuse_fields(body, {name: (usual.get(name, values), advice) for name, (values, advice) in known.items()})
    options = body.stream_options
    if options is not None:
        if not body.stream:
            raise bad_field("stream_options", "stream_options is for requests with stream=true")
        if (options.model_extra or {}).get("include_obfuscation"):
            raise unsupported("stream_options.include_obfuscation", "leave it out")
