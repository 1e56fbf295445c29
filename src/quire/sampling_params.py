"""What a user asks of sampling, stopping, grammars and beam search, as frozen values. No torch here.

Fields and defaults of ``SamplingParams`` are those of vLLM's, so that what is written for it works. Every value is checked
when the object is made.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, Self, TypeAlias, cast

from quire.config import check_int
from quire.errors import InvalidArgument
from quire.signatures import require_bool, require_text

LogitsProcessor: TypeAlias = Callable[[list[int], Any], Any]
"""``(token_ids, logits) -> logits``: the tokens generated so far, float32 ``torch.Tensor`` [V] in and out."""

MAX_CHOICES = 10_000
"""Strings of ``StructuredOutputs.choice``: compiling them takes time that grows faster than their number."""

MAX_GRAMMAR_CHARACTERS = 1_000_000
"""Of the text of a grammar. What compiles in time is far shorter."""

MAX_STOP_STRINGS = 256
"""All stop strings are searched for after every token, so their number is bounded."""

_GENERATION_CONFIG_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Names in ``generation_config.json`` to fields here; the same selection as vLLM's."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """A form that the text of a generation must have: exactly one of these fields.

    The text is in the language of the grammar unless something cut it short: ``max_tokens`` or the context (then
    ``finish_reason`` is "length"), a stop string, a cancel. A text to which nothing more can be added ends by itself, with "stop".
    EOS and stop tokens can be drawn exactly where the text may end. Whether the grammar can be had is checked when the
    request is submitted: one that takes too long to compile, too much memory or too deep a stack is refused as well. A grammar
    has at most ``MAX_GRAMMAR_CHARACTERS``.

    Raises ``InvalidArgument`` that names the field and the value.
    """

    json: Mapping[str, Any] | str | type | None = None
    """A JSON schema, or a class that gives one as pydantic's models do (``model_json_schema``; those with
    ``extra="forbid"`` have no other fields); kept as its JSON text. Between the tokens there may be up to
    8 spaces or tabs, or one or two line ends and up to 40; an object ``x-guidance`` in the schema takes
    llguidance's options, such as ``{"whitespace_flexible": false}``."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression for the whole text, in the syntax of Rust's ``regex`` without look-around."""
    grammar: str | None = None
    """A context-free grammar in llguidance's Lark syntax (it has a rule ``start``) or in llama.cpp's GBNF (``root``)."""
    choice: Sequence[str] | None = None
    """The text is one of these; kept as a tuple without duplicates."""

    def __post_init__(self) -> None:
        require_bool("structured_outputs.json_object", self.json_object)
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        given = [name for name, value in values.items() if value is not None and value is not False]
        if len(given) != 1:
            raise InvalidArgument(
                f"structured_outputs must have exactly one of {', '.join(values)}; got {given or 'none'}",
                field="structured_outputs",
            )
        object.__setattr__(self, "json", None if self.json is None else _schema("structured_outputs.json", self.json))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _text(f"structured_outputs.{name}", getattr(self, name))
        if self.choice is not None:
            if not _is_collection(self.choice) or not self.choice:
                raise InvalidArgument(
                    field="structured_outputs.choice", given=self.choice, allowed="a list of at least one string"
                )
            if len(self.choice) > MAX_CHOICES:
                raise InvalidArgument(
                    f"structured_outputs.choice must have at most {MAX_CHOICES} strings, got {len(self.choice)}; use a regex or a grammar",
                    field="structured_outputs.choice",
                )
            items = [_text(f"structured_outputs.choice.{number}", item) for number, item in enumerate(self.choice)]
            object.__setattr__(self, "choice", tuple(dict.fromkeys(items)))
        texts = [text for text in (self.json, self.regex, self.grammar) if isinstance(text, str)]
        characters = sum(map(len, [*texts, *(self.choice or ())]))
        if characters > MAX_GRAMMAR_CHARACTERS:
            raise InvalidArgument(
                f"structured_outputs.{given[0]} has {characters} characters; at most {MAX_GRAMMAR_CHARACTERS} are accepted",
                field=f"structured_outputs.{given[0]}",
            )


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn, and when it ends.

    The order of operations: the mask of ``structured_outputs``, ``logit_bias``, penalties, ban of end tokens before
    ``min_tokens``, ``logits_processors``, ``temperature``, ``top_k``, ``top_p`` (inside top-k), ``min_p``, softmax, one draw.
    Mask and ban hold after the processors too. ``logprobs`` are of the raw distribution, before all of these.

    Sequences become tuples and ``logit_bias`` a private dict with int keys, so later changes of what the caller passed
    do not reach a running request; treat the dict as read-only. Two objects with equal fields are equal and hash equal.

    Raises ``InvalidArgument`` (a ``ValueError``) that names the field, the value and the range.
    """

    n: int = 1
    """Samples per prompt; sample i draws from the generator of (``seed``, i)."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the first maximum."""
    top_p: float = 1.0
    """Keep the fewest most probable tokens whose mass, relative to what top-k kept, reaches this. (0, 1]; 1 is off."""
    top_k: int = -1
    """Keep that many of the largest logits, among equals those of lower id; 0 and -1 are off."""
    min_p: float = 0.0
    """Keep tokens whose probability is at least this fraction of the largest one. [0, 1]; 0 is off."""
    seed: int | None = None
    """Any 64-bit integer, signed or unsigned. The same seed gives the same tokens whatever else runs."""
    max_tokens: int | None = 16
    """Emitted tokens at most; None goes on up to the context length."""
    min_tokens: int = 0
    """EOS and stop tokens cannot be drawn before that many tokens. A text that its grammar completes ends before."""
    stop: str | Collection[str] | None = None
    """Strings that end the text; at most ``MAX_STOP_STRINGS``."""
    stop_token_ids: Collection[int] | None = None
    """Tokens that end the text, beside the model's EOS."""
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the output so far. [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it is in the output so far. [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies other logits of tokens in the prompt or output (CTRL, arXiv:1909.05858). > 0."""
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = field(default=None, hash=False)
    """Token id (or its decimal string, as in OpenAI's JSON) to what is added to its logit, [-100, 100]."""
    logprobs: int | None = None
    """None: none. 0: of the chosen token. N: of it and of the N most probable ones."""
    prompt_logprobs: int | None = None
    """The same of each token of the prompt but the first, which nothing predicts. The whole prompt is run, also what is
    cached of it."""
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    """What form the text must have; a mapping becomes ``StructuredOutputs``."""
    logits_processors: Sequence[LogitsProcessor] | None = field(default=None, hash=False)
    """Called one after the other for every token of this request, with the tokens that it has generated so far (without
    the prompt, as in vLLM) and its logits, a copy: float32 ``[V]`` on the model's device. Each returns logits of that kind,
    -inf for what must not be drawn; what a later one sees is what the one before returned. One that raises, or returns
    anything else, or NaN or +inf, ends its request with "error"."""

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "n": _integer("n", self.n, 1),
            "temperature": _number("temperature", self.temperature, 0.0),
            "top_p": _number("top_p", self.top_p, 0.0, 1.0, open_low=True),
            "top_k": _integer("top_k", self.top_k, -1),
            "min_p": _number("min_p", self.min_p, 0.0, 1.0),
            "seed": None if self.seed is None else _integer("seed", self.seed, -(2**63), 2**64 - 1),
            "max_tokens": None if self.max_tokens is None else _integer("max_tokens", self.max_tokens, 1),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0),
            "stop": _strings("stop", self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, 0.0, open_low=True),
            "logit_bias": _bias("logit_bias", self.logit_bias),
            "logprobs": None if self.logprobs is None else _integer("logprobs", self.logprobs, 0),
            "prompt_logprobs": None
            if self.prompt_logprobs is None
            else _integer("prompt_logprobs", self.prompt_logprobs, 0),
            "structured_outputs": _structured("structured_outputs", self.structured_outputs),
            "logits_processors": _processors("logits_processors", self.logits_processors),
        }
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            require_bool(name, getattr(self, name))
        if checked["max_tokens"] is not None and checked["min_tokens"] > checked["max_tokens"]:
            allowed = f"in 0..max_tokens ({checked['max_tokens']})"
            raise InvalidArgument(field="min_tokens", given=self.min_tokens, allowed=allowed)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` without duplicates, in the order given; empty for None."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(dict.fromkeys(self.stop))

    @property
    def stop_ids(self) -> frozenset[int]:
        """``stop_token_ids``; empty for None. The model's EOS is not among them unless the user named it."""
        return frozenset(self.stop_token_ids or ())

    @property
    def token_bias(self) -> Mapping[int, float]:
        """``logit_bias`` with int keys; empty for None."""
        return cast(Mapping[int, float], self.logit_bias or {})

    @property
    def grammar(self) -> StructuredOutputs | None:
        """``structured_outputs`` as a ``StructuredOutputs``."""
        return cast(StructuredOutputs | None, self.structured_outputs)

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the first maximum of the edited logits: temperature 0, or the single token of top-k 1.

        Such a request makes no random draw.
        """
        return self.temperature == 0 or self.top_k == 1

    @property
    def needs_history(self) -> bool:
        """Whether a penalty looks at earlier tokens."""
        return self.repetition_penalty != 1.0 or self.counts_output

    @property
    def counts_output(self) -> bool:
        """Whether a penalty looks at how often the output holds a token."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> Self:
        """Defaults for a model from the content of its ``generation_config.json``.

        As in vLLM, ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty`` and ``max_new_tokens`` count
        where they are given and not null, and absent ones keep the defaults of this class. ``do_sample`` is ignored:
        transformers means greedy when it is absent, which is rarely what a model's author meant. Other fields are
        ignored too, because the file is written for other engines as well. A bad value of a field that counts raises
        ``InvalidArgument``.
        """
        given = {
            ours: config[theirs] for theirs, ours in _GENERATION_CONFIG_FIELDS.items() if config.get(theirs) is not None
        }
        try:
            return cls(**given)
        except InvalidArgument as error:
            error.about("generation_config.json")
            raise


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """A search for the most probable continuations, of which ``beam_width`` are followed at a time.

    A hypothesis of L tokens has the score (sum of its tokens' raw log-probabilities) / L ** ``length_penalty``. In each step the
    continuations of all beams by one token are ranked by their sums. Among the ``beam_width`` best, those that end are finished
    hypotheses, of which the ``beam_width`` with the best scores are kept; the best that do not end are the next beams. This,
    and ``early_stopping``, is the search of transformers' ``generate(num_beams=...)``; ties go to the better beam, then to
    the lower token id.

    Raises ``InvalidArgument`` that names the field, the value and the range.
    """

    beam_width: int
    """At most the ``max_num_seqs`` of the engine."""
    max_tokens: int = 16
    """Tokens of a hypothesis at most; one of that length is finished."""
    length_penalty: float = 1.0
    """0: sums are compared, which favours short hypotheses; above 0: longer ones gain, below 0: they lose. [-10, 10]."""
    early_stopping: bool | Literal["never"] = False
    """True: end once ``beam_width`` hypotheses are finished. False: or rather once the best beam, if it ended now, would not be
    better than the worst of them. "never": once it cannot be, at ``max_tokens`` if ``length_penalty`` is above 0."""
    ignore_eos: bool = False
    stop: str | Collection[str] | None = None
    """Strings that end a hypothesis; they count for its score and are cut off its text."""
    stop_token_ids: Collection[int] | None = None
    """Tokens that end a hypothesis, beside the model's EOS."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "beam_width": _integer("beam_width", self.beam_width, 1),
            "max_tokens": _integer("max_tokens", self.max_tokens, 1),
            "length_penalty": _number("length_penalty", self.length_penalty, -10.0, 10.0),
            "stop": _strings("stop", self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
        }
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            require_bool(name, getattr(self, name))
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            allowed = 'True, False or "never"'
            raise InvalidArgument(field="early_stopping", given=self.early_stopping, allowed=allowed)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def sampling(self) -> SamplingParams:
        """What these say of stopping, as greedy sampling parameters."""
        return SamplingParams(
            temperature=0,
            max_tokens=self.max_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
    check_int(name, number, low, high)
    return cast(int, number)


def _number(name: str, value: object, low: float, high: float = math.inf, *, open_low: bool = False) -> float:
    """A finite number in ``[low, high]``, or ``(low, high]`` if ``open_low``."""
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an int that no float holds
            number = math.inf
    # A NaN fails every comparison, so it is refused here too.
    if not (math.isfinite(number) and (low < number if open_low else low <= number) and number <= high):
        if high == math.inf:
            allowed = f"a finite number {'>' if open_low else '>='} {low:g}"
        else:
            allowed = f"a number in {'(' if open_low else '['}{low:g}, {high:g}]"
        raise InvalidArgument(field=name, given=value, allowed=allowed)
    return number


def _is_collection(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes | bytearray | Mapping)


def _strings(name: str, value: object) -> str | tuple[str, ...] | None:
    if value is None:
        return None
    items = (
        (value,)
        if isinstance(value, str)
        else tuple(cast(Collection[object], value))
        if _is_collection(value)
        else None
    )
    if items is None or not all(isinstance(item, str) and item for item in items):
        raise InvalidArgument(field=name, given=value, allowed="a non-empty string or a list of non-empty strings")
    if len(items) > MAX_STOP_STRINGS:
        raise InvalidArgument(f"{name} must hold at most {MAX_STOP_STRINGS} strings, got {len(items)}", field=name)
    return value if isinstance(value, str) else cast(tuple[str, ...], items)


def _token_ids(name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not _is_collection(value):
        raise InvalidArgument(field=name, given=value, allowed="a list of token ids")
    return tuple(_integer(f"{name}.{number}", item, 0) for number, item in enumerate(cast(Collection[object], value)))


def _bias(name: str, value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidArgument(field=name, given=value, allowed="a mapping of token ids to numbers in [-100, 100]")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # No vocabulary has ids of more digits, and Python refuses to read numbers of thousands of them.
        is_decimal = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 20
        token = int(key) if is_decimal else key
        if not isinstance(token, Integral) or isinstance(token, bool) or token < 0:
            raise InvalidArgument(f"each key of {name} must be an integer >= 0, got {key!r}", field=name)
        if token in biases:
            raise InvalidArgument(f"{name} names token {token} twice; each token may be named once", field=name)
        biases[int(token)] = _number(f"{name}.{token}", bias, -100.0, 100.0)
    return biases


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidArgument(field=name, given=value, allowed="a non-empty string")
    require_text(name, value)
    return value


def _schema(name: str, value: object) -> str:
    """Return the JSON text of a schema: given as such, as a mapping, or by a class as pydantic's are."""
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


def _structured(name: str, value: object) -> StructuredOutputs | None:
    if value is None or isinstance(value, StructuredOutputs):
        return value
    known = [f.name for f in dataclasses.fields(StructuredOutputs)]
    if not isinstance(value, Mapping):
        allowed = f"StructuredOutputs or a dict with one of {', '.join(known)}"
        raise InvalidArgument(field=name, given=value, allowed=allowed)
    if unknown := [key for key in value if key not in known]:
        raise InvalidArgument(f"{name} has no field {unknown[0]!r}; its fields are {', '.join(known)}", field=name)
    return StructuredOutputs(**value)


def _processors(name: str, value: object) -> tuple[LogitsProcessor, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(callable(item) for item in value):
        raise InvalidArgument(field=name, given=value, allowed="a list of callables (token_ids, logits) -> logits")
    return tuple(value)
