"""How a chat template writes the calls of a turn, read off the template itself.

A model that is forced to call tools writes them so. Then the prompt of the next turn, in which the
template writes these calls, begins with the tokens that were generated, and their state is reused.

Histories with one, two and three calls are rendered. What stands around names and arguments must be
the same for all of them, but for ids, or the form is unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from quire.engine.chat_rendering import render_chat
from quire.engine.grammar_text import json_schema
from quire.engine.tokenizer import Tokenizer
from quire.errors import InvalidArgument
from quire.sampling_params import StructuredOutputs
from quire.server.harmony import STOPS
from quire.server.tool_formats import Offered
from quire.server.tool_reader import Reader, Steps
from quire.server.tools import ToolFormat

_NAMES = ("probed_first", "probed_second", "probed_third")
_IDS = ("probedid1", "probedid2", "probedid3")
"""Of nine letters and digits, as templates of Mistral want them."""
_ID, _ANY_ID = "\0", "/[a-zA-Z0-9]{9}/"
"""What stands for an id, in a form and in a grammar."""
_ARGUMENTS: Sequence[Mapping[str, Any]] = (
    {"probed_a": [1, "x"], "probed_b": "y"},
    {"probed_c": 2, "probed_d": [3, 4]},
    {"probed_e": {"x": 5}, "probed_f": 6},
)
_SAID = "probed answer"
_USER = {"role": "user", "content": "A probing question?"}
_SEPARATORS = ((", ", ": "), (",", ":"), (", ", ":"), (",", ": "))


@dataclass(frozen=True, kw_only=True, slots=True)
class CallForm:
    """The text of a turn that is calls, but for names and arguments."""

    head: str
    """The text before the first name."""
    between: str
    """That between a name and its arguments, a JSON object."""
    mid: str | None
    """That between arguments and the next name; None: a turn has one call."""
    tail: str
    """That behind the last arguments."""
    repeats: bool
    """Whether there may be more than two calls: the texts before the third and the second are the
    same."""
    separators: tuple[str, str]
    """What stands between the members of an object, and behind their keys."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.head, self.between, self.mid or "", self.tail)

    def grammar(
        self, functions: Mapping[str, Mapping[str, Any]], tokens: Mapping[str, int], *, one_call: bool
    ) -> StructuredOutputs:
        """Return the form of calls of ``functions``. ``tokens``: ids of the texts that are one
        token each."""
        write = partial(_literal, tokens=tokens)
        between = write(self.between)
        calls = " | ".join(f"{write(name)} {between} {self._json(schema)}" for name, schema in functions.items())
        more = "" if one_call or self.mid is None else f"({write(self.mid)} call){'*' if self.repeats else '?'}"
        return StructuredOutputs(
            grammar=f"start: {write(self.head)} call {more} {write(self.tail)}\ncall: {calls}\n",
        )

    def _json(self, schema: Mapping[str, Any]) -> str:
        item, key = self.separators
        spaced = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
        own = schema.get("x-guidance")
        options = {**spaced, **own} if isinstance(own, Mapping) else spaced
        wanted = StructuredOutputs(json={**schema, "x-guidance": options})
        return f"%json {json.dumps(json_schema(wanted), ensure_ascii=False)}"

    def format(self, own: ToolFormat | None) -> ToolFormat | None:
        """Return the format of texts under the grammar. Those with ids are read as the model's
        ``own``; None if that cannot be."""
        if any(_ID in text for text in self.texts):
            return replace(own, whole=True) if own is not None and self.head.startswith(own.markers) else None
        return ToolFormat(name="forced", markers=(), grammar=self._read, only_calls=True, texts=self.texts)

    def _read(self, reader: Reader, marker: str, offered: Offered) -> Steps[None]:
        names = {f"{name}{self.between}": name for name in offered.names or ()}
        yield from reader.space()
        yield from reader.expect(self.head.lstrip())
        while True:
            reader.begin(names[(yield from reader.one_of(names))])
            yield from reader.value(reader.add, lenient=True)
            reader.whole = True
            if self.mid is None or not (yield from reader.accept(self.mid)):
                break
            reader.commit()
        yield from reader.expect(self.tail, or_end=True)
        reader.commit()


def _literal(text: str, tokens: Mapping[str, int]) -> str:
    """Return a text in a grammar, in which such tokens are tokens."""
    known = {token: f"<[{number}]>" for token, number in tokens.items()} | {_ID: _ANY_ID}
    pattern = re.compile("(" + "|".join(map(re.escape, sorted(known, key=len, reverse=True))) + ")")
    parts = [part for part in pattern.split(text) if part]
    return " ".join(known[part] if part in known else json.dumps(part, ensure_ascii=False) for part in parts)


def tokens_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the added tokens, special or not: texts that are one token each."""
    added = tokenizer.backend.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if token.content}


def call_form_of(
    tokenizer: Tokenizer, template: str, eos_ids: Collection[int], markers: Sequence[str], closer: str | None
) -> CallForm | None:
    """Return the form of calls in a template; None if it cannot be read off.

    ``markers``: beginnings of calls, where known. ``closer``: the mark behind reasoning.
    """
    ends = {tokenizer.decode([number], skip_special_tokens=False) for number in eos_ids}
    named = tuple(sorted(tokenizer.special_tokens.items()))
    return _derived(template, tuple(sorted(ends | {*STOPS} - {""})), tuple(markers), closer, named)


@lru_cache(maxsize=64)
def _derived(
    template: str,
    ends: tuple[str, ...],
    markers: tuple[str, ...],
    closer: str | None,
    named: tuple[tuple[str, str], ...],
) -> CallForm | None:
    tool = {"name": "probed_other", "description": "It probes.", "parameters": {"type": "object", "properties": {}}}
    variables: dict[str, Any] = {"tools": [{"type": "function", "function": tool}], **dict(named)}

    def render(messages: Sequence[Mapping[str, Any]], *, asks: bool = False) -> str:
        return _without_ids(render_chat(template, messages, add_generation_prompt=asks, **variables))

    def turn(count: int) -> list[dict[str, Any]]:
        calls = [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id_, name, arguments in zip(_IDS, _NAMES, _ARGUMENTS, strict=True)
        ]
        return [_USER, {"role": "assistant", "content": None, "tool_calls": calls[:count]}]

    def with_results(count: int) -> str:
        results = [
            {"role": "tool", "tool_call_id": id_, "name": name, "content": "probed result"}
            for id_, name in zip(_IDS[:count], _NAMES, strict=False)
        ]
        return render([*turn(count), *results])

    try:
        prompt, one = render([_USER], asks=True), with_results(1)
        pieces = _cut(one[_begin(one, prompt, markers) :], 1)
    except (InvalidArgument, ValueError):
        return None
    head, between, rest, separators = pieces[0], pieces[1], pieces[-2], pieces[-1]
    if closer is not None and closer in head:
        head = head.rpartition(closer)[2].lstrip()
    tail = _before(rest, ends)
    if tail is None:
        try:
            last = render(turn(1))
            said = render([_USER, {"role": "assistant", "content": _SAID}])
        except InvalidArgument:
            return None
        tail = _without_end(_cut(last[_begin(last, prompt, markers) :], 1)[-2], said.rpartition(_SAID)[2])
    mid: str | None = None
    repeats = False
    try:
        for count in (2, 3):
            text = with_results(count)
            pieces = _cut(text[_begin(text, prompt, markers) :], count)
            if set(pieces[1:-2:2]) != {between} or not pieces[-2].startswith(tail) or pieces[-1] != separators:
                break
            mid, repeats = pieces[2], count == 3 and pieces[2] == pieces[4]
    except (InvalidArgument, ValueError):
        pass
    form = CallForm(head=head, between=between, mid=mid, tail=tail, repeats=repeats, separators=separators)
    known = (*_NAMES, "probed result", _USER["content"])
    return None if not between or any(one in text for text in form.texts for one in known) else form


def _without_ids(text: str) -> str:
    for id_ in _IDS:
        text = text.replace(id_, _ID)
    return text


def _begin(text: str, prompt: str, markers: Sequence[str]) -> int:
    """Return where the calls begin. ``ValueError`` if that is unknown."""
    if text.startswith(prompt):
        return len(prompt)
    # The prompt goes on in another way, as with the beginning of a thought.
    pairs = zip(text, prompt, strict=False)
    common = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(text), len(prompt)))
    found = [text.find(marker, max(0, common - len(marker) + 1)) for marker in markers]
    return min(at for at in found if at >= 0)


def _cut(text: str, count: int) -> tuple[Any, ...]:
    """Return what stands before, between and behind names and arguments, and the separators of
    JSON. ``ValueError`` if they are not there in this order."""
    for separators in _SEPARATORS:
        at, pieces = 0, []
        for name, arguments in list(zip(_NAMES, _ARGUMENTS, strict=True))[:count]:
            written = json.dumps(arguments, separators=separators)
            place = text.index(name, at)
            begin = text.find(written, place)
            if begin < 0:
                break
            pieces += [text[at:place], text[place + len(name) : begin]]
            at = begin + len(written)
        else:
            return (*pieces, text[at:], separators)
    raise ValueError("the arguments are not there as JSON")


def _before(text: str, ends: Collection[str]) -> str | None:
    """Return a text up to the first of ``ends``; None if there is none."""
    places = [place for end in ends if (place := text.find(end)) >= 0]
    return text[: min(places)] if places else None


def _without_end(text: str, end: str) -> str:
    """Return a text without what it has in common with ``end`` at its end."""
    size = 0
    while size < min(len(text), len(end)) and text[-1 - size] == end[-1 - size]:
        size += 1
    return text[: len(text) - size]
