"""Parameters of sampling, stopping, grammars and beam search, as frozen values. No torch here.

``SamplingParams`` has vLLM's fields and defaults, so that programs written for vLLM work. Every
value is checked when the object is made.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias, cast

from quire.base.errors import InvalidArgument
from quire.base.sampling_fields import (
    BIAS,
    MAX_STOP_STRINGS,
    SEED,
    SOME_IDS,
    STRINGS,
    SWITCH,
    TOKEN_IDS,
    Declaration,
    Kind,
    Surface,
    check_fields,
    declarations_on,
    declared,
    integer,
    is_collection,
    number,
)
from quire.base.signatures import require_bool, require_text, suggests_keywords

LogitsProcessor: TypeAlias = Callable[[list[int], Any], Any]
"""``(token_ids, logits) -> logits``: generated ids; float32 ``torch.Tensor`` [V] in and out."""

MAX_CHOICES = 10_000
"""Most strings of ``StructuredOutputs.choice``. Compiling takes more than linear time in them."""

MAX_GRAMMAR_CHARACTERS = 1_000_000
"""Most characters of a grammar. Grammars that compile in time are far shorter."""


FORMS = ("json", "json_object", "regex", "grammar", "choice")
"""The fields of ``StructuredOutputs`` of which exactly one is given."""
_SWITCHES = ("disable_any_whitespace", "disable_additional_properties")
_MARKS = ("reasoning_end", "reasoning_begin")
MAX_MARK = 256
"""Most characters of a mark around reasoning."""

MOST_SAMPLES = 16_384
"""Most samples of a prompt, and forks of a session in one call."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The form that a generated text must have, given by exactly one of the first five fields.

    The others are vLLM's options for JSON. Unlike vLLM's they are on by default.

    The text is in the grammar's language unless it was cut short: by ``max_tokens`` or the context
    (``finish_reason`` "length"), by a stop string or by a cancel. A complete text that nothing can
    follow ends with "stop". EOS and stop tokens can be drawn exactly where the text may end.

    The grammar is compiled when the request is submitted. It is refused if that takes too much
    time, memory or stack. It has at most ``MAX_GRAMMAR_CHARACTERS``.

    Raises ``InvalidArgument`` that names the field and the value.
    """

    json: Mapping[str, Any] | str | type | None = None
    """A JSON schema, or a class with ``model_json_schema``, such as pydantic's models; kept as JSON
    text. The object ``x-guidance`` in a schema holds llguidance's options, such as
    ``{"whitespace_flexible": true}``. A schema that the grammar cannot enforce is refused by name.
    Not every valid text can be generated: bounds of numbers hold to 15 digits, and bounds beyond
    2**63 are moved to it."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression for the whole text, in the syntax of Rust's ``regex`` (no
    look-around)."""
    grammar: str | None = None
    """A context-free grammar: llguidance's Lark (rule ``start``) or llama.cpp's GBNF (``root``)."""
    choice: Sequence[str] | None = None
    """The possible texts; kept as a tuple without duplicates."""
    disable_any_whitespace: bool = True
    """No white space between the tokens of JSON. If false, there may be up to 8 spaces or tabs, or
    one or two line ends and up to 40; weak models then write long runs of white space."""
    disable_additional_properties: bool = True
    """Objects of a JSON schema that name properties have no others, unless their schema has
    ``additionalProperties``. The parts of a combination (``allOf``) stay as they are."""
    whitespace_pattern: str | None = None
    """A regular expression of the white space between the tokens of JSON."""
    reasoning_end: str | int | None = None
    """The mark after a model's reasoning, as text or as the id of a special token. Any text may
    precede its first occurrence; the text of the form follows it."""
    reasoning_begin: str | int | None = None
    """The mark before the reasoning. A text that does not begin with it must have the form as a
    whole. None: the prompt ends within the reasoning."""

    def __post_init__(self) -> None:
        for name in ("json_object", *_SWITCHES):
            require_bool(f"structured_outputs.{name}", getattr(self, name))
        given = self.forms
        if len(given) != 1:
            raise InvalidArgument(
                f"structured_outputs must have exactly one of {', '.join(FORMS)}; got {list(given) or 'none'}",
                field="structured_outputs",
            )
        ((name, value),) = given.items()
        if self.whitespace_pattern is not None:
            _text("structured_outputs.whitespace_pattern", self.whitespace_pattern)
            if name not in ("json", "json_object"):
                raise InvalidArgument(
                    f"structured_outputs.whitespace_pattern is for json and json_object, got {name}",
                    field="structured_outputs.whitespace_pattern",
                )
        for name_of_mark in _MARKS:
            _mark(f"structured_outputs.{name_of_mark}", getattr(self, name_of_mark))
        if self.reasoning_begin is not None and self.reasoning_end is None:
            message = "structured_outputs.reasoning_begin needs reasoning_end; give both"
            raise InvalidArgument(message, field="structured_outputs.reasoning_begin")
        if name == "json_object":
            return
        path = f"structured_outputs.{name}"
        kept = {"json": _schema, "choice": _choices}.get(name, _text)(path, value)
        object.__setattr__(self, name, kept)
        characters = len(kept) if isinstance(kept, str) else sum(map(len, kept))
        characters += len(self.whitespace_pattern or "")
        if characters > MAX_GRAMMAR_CHARACTERS:
            raise InvalidArgument(
                f"{path} has {characters} characters; at most {MAX_GRAMMAR_CHARACTERS} are accepted", field=path
            )

    @property
    def forms(self) -> dict[str, Any]:
        """The given fields that define the form of the text, by name."""
        values = {name: getattr(self, name) for name in FORMS}
        return {
            name: value
            for name, value in values.items()
            if value is not None and (name, value) != ("json_object", False)
        }

    @property
    def given(self) -> dict[str, Any]:
        """All fields, as arguments of an equal object. They are plain data."""
        options = {name: getattr(self, name) for name in (*_SWITCHES, "whitespace_pattern", *_MARKS)}
        return self.forms | options


def _mark(path: str, mark: object) -> None:
    if mark is None:
        return
    token = isinstance(mark, int) and not isinstance(mark, bool) and mark >= 0
    if not token and not (isinstance(mark, str) and 0 < len(mark) <= MAX_MARK):
        allowed = f"a text of 1 to {MAX_MARK} characters, or the id of a special token"
        raise InvalidArgument(field=path, given=mark, allowed=allowed)


def _structured(name: str, value: object) -> StructuredOutputs:
    if isinstance(value, StructuredOutputs):
        return value
    known = [f.name for f in dataclasses.fields(StructuredOutputs)]
    if not isinstance(value, Mapping):
        allowed = f"StructuredOutputs or a dict with one of {', '.join(known)}"
        raise InvalidArgument(field=name, given=value, allowed=allowed)
    if unknown := [key for key in value if key not in known]:
        raise InvalidArgument(f"{name} has no field {unknown[0]!r}; its fields are {', '.join(known)}", field=name)
    return StructuredOutputs(**value)


def _processors(name: str, value: object) -> tuple[LogitsProcessor, ...]:
    if not isinstance(value, (list, tuple)) or not all(callable(item) for item in value):
        raise InvalidArgument(field=name, given=value, allowed="a list of callables (token_ids, logits) -> logits")
    return tuple(value)


def _early_stopping(name: str, value: object) -> object:
    if not isinstance(value, bool) and value != "never":
        raise InvalidArgument(field=name, given=value, allowed='True, False or "never"')
    return value


_TERMINAL = Surface.HTTP | Surface.COMMAND
_DRAWN = _TERMINAL | Surface.EXECUTORS
_ALL = _DRAWN | Surface.GENERATION_CONFIG


@suggests_keywords
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling and stopping parameters of one request.

    The order of operations: the masks of ``structured_outputs``, ``allowed_token_ids`` and
    ``bad_words``, ``logit_bias``, penalties, the ban of end tokens before ``min_tokens``,
    ``logits_processors``, ``temperature``, ``top_k``, ``top_p`` (inside top-k), ``min_p``, softmax,
    one draw. Masks and ban hold after the processors too. ``logprobs`` are of the raw distribution,
    before all of these.

    Sequences become tuples and ``logit_bias`` a private dict with int keys, so later changes by the
    caller do not affect a running request. Treat the dict as read-only. Two objects with equal
    fields are equal and hash equal.

    Raises ``InvalidArgument`` (a ``ValueError``) that names the field, the value and the range.
    """

    n: int = declared(
        1, integer(1, MOST_SAMPLES), "Samples per prompt; sample i draws from the generator of (seed, i)."
    )
    temperature: float = declared(
        1.0, number(0.0), "Divides the logits; 0 takes the most likely token, higher is more random.", on=_ALL
    )
    top_p: float = declared(
        1.0, number(0.0, 1.0, open_low=True), "Sample from the smallest set with this probability; 1 is off.", on=_ALL
    )
    """The mass of the fewest most probable tokens, relative to what top-k kept, reaches this."""
    top_k: int = declared(-1, integer(-1), "Sample from this many most likely tokens; 0 and -1 are off.", on=_ALL)
    """Of equal logits those of lower ids are kept."""
    min_p: float = declared(
        0.0, number(0.0, 1.0), "Drop tokens below this share of the most likely one's probability; 0 is off.", on=_ALL
    )
    seed: int | None = declared(
        None,
        SEED,
        "64-bit integer (signed or not) that makes the tokens reproducible; -1 is none.",
        on=_DRAWN,
    )
    max_tokens: int | None = declared(
        16,
        integer(1),
        "Tokens to generate at most.",
        on=_ALL,
        names={Surface.GENERATION_CONFIG: "max_new_tokens"},
        alias="max_completion_tokens",
    )
    """None: up to the context length."""
    min_tokens: int = declared(
        0, integer(0), "Tokens before which no end token or stop string ends the text.", on=_TERMINAL
    )
    """A text that its grammar completes ends before."""
    stop: str | Collection[str] | None = declared(
        None, STRINGS, f"End the text before this string, or one of these (at most {MAX_STOP_STRINGS}).", on=_TERMINAL
    )
    stop_token_ids: Collection[int] | None = declared(
        None, TOKEN_IDS, "End the text at this token, or one of these, besides the model's end token.", on=_TERMINAL
    )
    ignore_eos: bool = declared(False, SWITCH, "Go on after the model's end token.", on=_TERMINAL)
    include_stop_str_in_output: bool = declared(False, SWITCH, "Keep the stop string that ended the text.")
    presence_penalty: float = declared(
        0.0, number(-2.0, 2.0), "Subtracted once from logits of generated tokens, in [-2, 2].", on=_DRAWN
    )
    frequency_penalty: float = declared(
        0.0,
        number(-2.0, 2.0),
        "Subtracted from a token's logit for each time it was generated, in [-2, 2].",
        on=_DRAWN,
    )
    repetition_penalty: float = declared(
        1.0, number(0.0, open_low=True), "Against tokens of prompt and text, above 0; 1 is off.", on=_ALL
    )
    """Divides positive and multiplies other logits of these tokens (CTRL, arXiv:1909.05858)."""
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = declared(
        None,
        BIAS,
        "Token id (in decimal) to what is added to the token's logit, in [-100, 100].",
        on=Surface.HTTP | Surface.EXECUTORS,
        hash=False,
    )
    allowed_token_ids: Collection[int] | None = declared(
        None,
        SOME_IDS,
        "Draw only these tokens; an end token that is not one of them ends no text.",
        on=Surface.HTTP | Surface.EXECUTORS,
    )
    bad_words: str | Collection[str] | None = declared(
        None, STRINGS, f"Never draw the tokens of this word, or of one of these (at most {MAX_STOP_STRINGS}) in a row."
    )
    """Of each word these tokens are meant: of the word as it is given, without spaces before it,
    and behind one space. The last one is excluded where the others are the last tokens of the
    output. Other tokens that spell the word are not excluded."""
    logprobs: int | None = declared(
        None,
        integer(0),
        "Log-probabilities of each token, and of so many of the most likely ones.",
        names={Surface.CHATS: "top_logprobs"},
    )
    """None: none. 0: of the chosen token. N: of it and of the N most probable ones."""
    prompt_logprobs: int | None = declared(
        None,
        integer(0),
        "Log-probabilities of the prompt's tokens but the first; runs all of the prompt, also what is cached.",
        on=Surface.COMPLETIONS | Surface.CHATS,
    )
    speculative: bool = declared(
        True, SWITCH, "Let the engine verify drafts of later tokens, if it is to; the tokens are the same."
    )
    exact: bool = declared(
        False, SWITCH, "The tokens are those of a run alone, to the bit, whatever else the engine runs."
    )
    """``docs/speculation.md`` says what that costs, and where it is refused."""
    skip_special_tokens: bool = declared(True, SWITCH, "Leave special tokens out of the text.")
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = declared(  # noqa: RUF009
        None, Kind(_structured, dict[str, Any]), "The text's form: json, json_object, regex, grammar or choice."
    )
    logits_processors: Sequence[LogitsProcessor] | None = declared(
        None, Kind(_processors), "Functions that edit the logits of every token.", on=Surface(0), hash=False
    )
    """Called in order for every token of the request, with the tokens generated so far (without the
    prompt, as in vLLM) and a copy of the logits: float32 ``[V]`` on the model's device. Each
    returns such logits, -inf for tokens that must not be drawn, as input of the next one. A
    processor that raises, or returns anything else, NaN or +inf, ends its request with "error"."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            allowed = f"in 0..max_tokens ({self.max_tokens})"
            raise InvalidArgument(field="min_tokens", given=self.min_tokens, allowed=allowed)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` without duplicates, in the order given; empty for None."""
        return _listed(self.stop)

    @property
    def words(self) -> tuple[str, ...]:
        """``bad_words`` without duplicates, in the order given; empty for None."""
        return _listed(self.bad_words)

    @property
    def stop_ids(self) -> frozenset[int]:
        """``stop_token_ids``; empty for None. Without the model's EOS unless the user named it."""
        return frozenset(self.stop_token_ids or ())

    @property
    def token_bias(self) -> Mapping[int, float]:
        """``logit_bias`` with int keys; empty for None."""
        return cast(Mapping[int, float], self.logit_bias or {})

    @property
    def given_ids(self) -> Mapping[str, Collection[int]]:
        """The token ids that the fields name, by field."""
        return {
            "logit_bias": self.token_bias,
            "stop_token_ids": sorted(self.stop_ids),
            "allowed_token_ids": self.allowed_token_ids or (),
        }

    @property
    def grammar(self) -> StructuredOutputs | None:
        """``structured_outputs`` as a ``StructuredOutputs``."""
        return cast(StructuredOutputs | None, self.structured_outputs)

    @property
    def is_greedy(self) -> bool:
        """True if the choice is the first maximum of the edited logits: temperature 0 or top-k 1.
        Such a request makes no random draw."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def needs_history(self) -> bool:
        """True if a penalty depends on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any], name: str = "generation_config.json") -> Self:
        """Return the defaults of a model from the content of its ``generation_config.json``, which
        errors call ``name``.

        As in vLLM, ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty`` and
        ``max_new_tokens`` count unless they are null; absent ones keep the defaults of this class.
        ``do_sample`` is ignored: transformers treats its absence as greedy, which model authors
        rarely intend. Other fields are ignored too, because they are for other engines. Raise
        ``InvalidArgument`` for a bad value of a field that counts.
        """
        known = declarations_on(cls, Surface.GENERATION_CONFIG)
        given = {ours: config[theirs] for theirs, (ours, _) in known.items() if config.get(theirs) is not None}
        try:
            return cls(**given)
        except InvalidArgument as error:
            error.about(name)
            raise


@suggests_keywords
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """A search for the most probable continuations that follows ``beam_width`` of them at a time.

    A hypothesis of L tokens scores (sum of its raw log-probabilities) / L ** ``length_penalty``.
    Each step ranks all continuations of the beams by one token, by their sums. Among the
    ``beam_width`` best, those that end are finished hypotheses; the ``beam_width`` of these with
    the best scores are kept. The best continuations that do not end are the next beams. Ties go to
    the better beam, then to the lower token id. This, with ``early_stopping``, is the search of
    transformers' ``generate(num_beams=...)``.

    Raises ``InvalidArgument`` that names the field, the value and the range.
    """

    beam_width: int = field(metadata={"declaration": Declaration(integer(1))})
    """At most the engine's ``max_num_seqs``."""
    max_tokens: int = declared(16, integer(1))
    """Tokens of a hypothesis at most. A hypothesis of that length is finished."""
    length_penalty: float = declared(1.0, number(-10.0, 10.0))
    """0 compares the sums, which favours short hypotheses. Above 0 favours longer ones."""
    early_stopping: bool | Literal["never"] = declared(False, Kind(_early_stopping))
    """True: end once ``beam_width`` hypotheses are finished. False: end once the best beam, if it
    ended now, would also not be better than the worst of them. "never": end once it cannot become
    better; with ``length_penalty`` above 0 that is at ``max_tokens``."""
    ignore_eos: bool = declared(False, SWITCH)
    stop: str | Collection[str] | None = declared(None, STRINGS)
    """Strings that end a hypothesis. They count for its score and are cut off its text."""
    stop_token_ids: Collection[int] | None = declared(None, TOKEN_IDS)
    """Tokens that end a hypothesis, besides the model's EOS."""
    include_stop_str_in_output: bool = declared(False, SWITCH)
    skip_special_tokens: bool = declared(True, SWITCH)

    def __post_init__(self) -> None:
        check_fields(self)

    def sampling(self) -> SamplingParams:
        """Return greedy sampling parameters with the same stop conditions."""
        stopping = {one.name for one in dataclasses.fields(self)} & {
            one.name for one in dataclasses.fields(SamplingParams)
        }
        return SamplingParams(temperature=0, **{name: getattr(self, name) for name in stopping})


def _listed(strings: str | Collection[str] | None) -> tuple[str, ...]:
    return (strings,) if isinstance(strings, str) else tuple(dict.fromkeys(strings or ()))


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidArgument(field=name, given=value, allowed="a non-empty string")
    require_text(name, value)
    return value


def _choices(name: str, value: Any) -> tuple[str, ...]:
    if not is_collection(value) or not value:
        raise InvalidArgument(field=name, given=value, allowed="a list of at least one string")
    if len(value) > MAX_CHOICES:
        raise InvalidArgument(
            f"{name} must have at most {MAX_CHOICES} strings, got {len(value)}; use a regex or a grammar", field=name
        )
    return tuple(dict.fromkeys(_text(f"{name}.{number}", item) for number, item in enumerate(value)))


def _schema(name: str, value: object) -> str:
    """Return the JSON text of a schema that is text, a mapping, or a class as pydantic's models."""
    of_class = getattr(value, "model_json_schema", None)
    if isinstance(value, type) and callable(of_class):
        whose = value.__name__
        try:
            value = of_class()
        except Exception as error:  # whatever the class raises is the caller's mistake
            raise InvalidArgument(f"{name}: {whose} has no JSON schema: {error}", field=name) from error
    if isinstance(value, Mapping):
        try:
            return _text(name, json.dumps(dict(value), ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(
                f"{name} must be a JSON schema; what was given is no JSON: {error}", field=name
            ) from None
    if not isinstance(value, str):
        allowed = "a JSON schema as a dict, as JSON text or as a pydantic model's class"
        raise InvalidArgument(field=name, given=value, allowed=allowed)
    try:
        json.loads(_text(name, value))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"{name} must be a JSON schema; the text is no JSON: {error}, got {value[:100]!r}", field=name
        ) from None
    return value
