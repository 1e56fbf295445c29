"""How a chat template writes the calls of a turn, read off the template itself.

A model that is forced to call tools writes them so. Then the prompt of the next turn, in which the
template writes these calls, begins with the tokens that were generated, and their state is reused.

Histories with one, two and three calls are rendered. What stands around names and arguments must be
the same for all of them, but for ids, or the form is unknown. A template writes the arguments of a
call as a JSON object (``CallForm``), or one by one (``ItemForm``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from quire.base.errors import InvalidArgument
from quire.base.sampling_params import StructuredOutputs
from quire.grammars.formats import json_schema
from quire.grammars.schema_nodes import schemas
from quire.server.tools.formats import Offered, target_of, types_of
from quire.server.tools.harmony import STOPS
from quire.server.tools.reader import Reader, Steps
from quire.server.tools.tools import ToolFormat
from quire.text.chat_rendering import render_chat
from quire.text.tokenizer import Tokenizer

_NAMES = ("probed_first", "probed_second", "probed_third")
_IDS = ("probedid1", "probedid2", "probedid3")
"""Of nine letters and digits, as templates of Mistral want them."""
_NAMED_IDS = tuple(f"functions.{name}:{number}" for name, number in zip(_NAMES, (7001, 7002, 7003), strict=True))
"""As Kimi's templates want them, which write no name beside the id."""
_ID, _ANY_ID = "\0", "/[a-zA-Z0-9]{9}/"
"""What stands for an id, in a form and in a grammar."""
_NUMBER, _ANY_NUMBER = "\1", "/[0-9]{1,4}/"
"""What stands for the number in an id."""
_ARGUMENTS: Sequence[Mapping[str, Any]] = (
    {"probed_a": [1, "x"], "probed_b": "y"},
    {"probed_c": 2, "probed_d": [3, 4]},
    {"probed_e": {"x": 5}, "probed_f": 6},
)
_ITEMS: Mapping[str, Any] = {
    "probed_a": [1, {"x": "y"}],
    "probed_b": "probed text",
    "probed_c": 7,
    "probed_d": True,
    "probed_e": None,
}
"""Arguments of all kinds. Their names are in the order of the alphabet."""
_SAID = "probed answer"
_USER = {"role": "user", "content": "A probing question?"}
_SEPARATORS = ((", ", ": "), (",", ":"), (", ", ":"), (",", ": "))
_KEY = re.compile(r"[A-Za-z_][\w$-]*")
_ANNOTATIONS = frozenset(("title", "description", "default", "example", "examples", "deprecated"))
_PLAIN = _ANNOTATIONS | {"type"}
_OBJECT = _PLAIN | {"properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "strict"}
"""Keywords of the arguments whose members can be written one by one."""
_LOCAL = ("#/$defs/", "#/definitions/")


# -- arguments as a JSON object --------------------------------------------------------------------


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
        calls = " | ".join(
            f"{write(name)} {between} {_json(schema, self.separators)}" for name, schema in functions.items()
        )
        return StructuredOutputs(grammar=f"{_start(self, write, one_call)}\ncall: {calls}\n")

    def format(self, own: ToolFormat | None) -> ToolFormat | None:
        """Return the format of texts under the grammar. Those with ids are read as the model's
        ``own``; None if that cannot be."""
        if any(mark in text for text in self.texts for mark in (_ID, _NUMBER)):
            return _whole(self.head, own)
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


# -- arguments one by one --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemForm:
    """The text of a turn that is calls, but for names, and names and values of arguments."""

    head: str
    """The text before the first name."""
    first: str
    """That between a function's name and the first argument's."""
    equals: str
    """That between an argument's name and its value."""
    last: str
    """That behind each value."""
    item: str
    """That between ``last`` and the next argument's name."""
    none: str
    """That behind the name of a function that is called without arguments."""
    mid: str | None
    """That between a call and the next name; None: a turn has one call."""
    tail: str
    """That behind the last call."""
    repeats: bool
    """Whether there may be more than two calls."""
    separators: tuple[str, str]
    """``CallForm.separators``, in values that are JSON."""
    quotes: bool
    """Whether texts are written as JSON, too."""
    python_words: bool
    """Whether ``True`` is written for ``true``."""

    def text(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the text of calls."""
        written = []
        for name, arguments in calls:
            items = f"{self.last}{self.item}".join(
                f"{key}{self.equals}{self._value(value)}" for key, value in arguments.items()
            )
            written.append(f"{name}{self.first}{items}{self.last}" if arguments else f"{name}{self.none}")
        return self.head + (self.mid or "").join(written) + self.tail

    def _value(self, value: Any) -> str:
        if isinstance(value, str) and not self.quotes:
            return value
        if self.python_words and (value is None or isinstance(value, bool)):
            return str(value)
        return json.dumps(value, separators=self.separators)

    def grammar(
        self, functions: Mapping[str, Mapping[str, Any]], tokens: Mapping[str, int], *, one_call: bool
    ) -> StructuredOutputs | None:
        """Return the form of calls of ``functions``; None if a schema restricts
        texts in a way that cannot be held to without quotes. Arguments come in the order of the
        schema, and none that it does not list. ``tokens``: ids of the texts that are one token
        each."""
        write = partial(_literal, tokens=tokens)
        calls, rules = [], []
        for number, (name, schema) in enumerate(functions.items()):
            values = self._values(schema, write)
            if values is None:
                return None
            calls.append(f"{write(name)} first_{number}_0")
            required = schema.get("required", ())
            for place, (key, value) in enumerate(values.items()):
                item = f"{write(key + self.equals)} {value} next_{number}_{place + 1}"
                for rule, before in (("first", self.first), ("next", self.item)):
                    skipped = "" if key in required else f" | {rule}_{number}_{place + 1}"
                    rules.append(f"{rule}_{number}_{place}: {write(before)} {item}{skipped}")
            rules.append(f"first_{number}_{len(values)}: {write(self.none) or EMPTY}")
            rules.append(f"next_{number}_{len(values)}: {EMPTY}")
        if not self.quotes:
            rules.append(f"rest: {self._up_to_last(tokens)}")
        rules = [_start(self, write, one_call), f"call: {' | '.join(calls)}", *rules, ""]
        return StructuredOutputs(grammar="\n".join(rules))

    def _up_to_last(self, tokens: Mapping[str, int]) -> str:
        """Return any text up to ``last`` and with it."""
        before, token, after = _parted(self.last, tokens)
        if token is None:
            return f"rest_text\nrest_text[suffix={json.dumps(self.last, ensure_ascii=False)}]: /(?s:.*)/"
        return f"/(?s:.*){_pattern(before)}/ <[{token}]> {_literal(after, tokens)}"

    def _values(self, schema: Mapping[str, Any], write: Any) -> dict[str, str] | None:
        """Return the grammar of each argument's value and of the text behind it; None if one
        cannot be written."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not schema.keys() <= _OBJECT or not isinstance(properties, Mapping) or not isinstance(required, list):
            return None
        if not set(map(str, required)) <= properties.keys() or not all(map(_KEY.fullmatch, properties)):
            return None
        if any(not str(node["$ref"]).startswith(_LOCAL) for _, node in schemas(schema) if "$ref" in node):
            return None
        if any("$id" in node or "$anchor" in node for _, node in schemas(schema)):
            return None
        found: dict[str, str] = {}
        for key, value in properties.items():
            rule = self._value_rule(value, schema, write)
            if rule is None or sum(map(len, found.values())) + len(rule) > MAX_RULES:
                return None
            found[key] = rule
        return found

    def _value_rule(self, schema: Any, root: Mapping[str, Any], write: Any) -> str | None:
        if not isinstance(schema, dict):
            return None
        refers = any("$ref" in node for _, node in schemas(schema))
        named = {word: root[word] for word in ("$defs", "definitions") if refers and word in root}
        as_json = f"{_json({**schema, **named}, self.separators)} {write(self.last)}"
        if self.quotes:
            return as_json
        types = types_of(schema, root)
        meant: Any = schema
        for _ in range(MAX_REFERENCES):
            if not isinstance(meant, dict) or "$ref" not in meant or not meant.keys() <= _ANNOTATIONS | {"$ref"}:
                break
            meant = target_of(meant, root)
        if not isinstance(meant, dict) or "$ref" in meant:
            return as_json if types and "string" not in types else None
        if types == {"string"} and meant.keys() <= _PLAIN | {"enum"} and "enum" in meant:
            texts = [one for one in meant["enum"] if isinstance(one, str) and self.last.strip() not in one]
            return f"({' | '.join(map(write, texts))}) {write(self.last)}" if texts == meant["enum"] else None
        if "string" in types or not types:
            return "rest" if _is_plain(meant) else None
        if types == {"boolean"} and meant.keys() <= _PLAIN and self.python_words:
            return f'("True" | "False") {write(self.last)}'
        return as_json

    def format(self, own: ToolFormat | None) -> ToolFormat | None:
        """Return the format of texts under the grammar, which is the model's ``own``; None if that
        cannot be."""
        return _whole(self.head, own)


EMPTY = '""'
MAX_RULES = 500_000
"""Most characters of the grammar of a function's arguments: each argument has the definitions that
its schema refers to."""
MAX_REFERENCES = 16
"""Most references to references that are followed."""


def _is_plain(schema: object) -> bool:
    """Return whether any text is a value: a schema tells no more than types."""
    if not isinstance(schema, Mapping):
        return False
    branches = [one for word in ("anyOf", "oneOf") for one in schema.get(word, ())]
    return schema.keys() <= _PLAIN | {"anyOf", "oneOf"} and all(map(_is_plain, branches))


# -- grammars --------------------------------------------------------------------------------------


def _start(form: CallForm | ItemForm, write: Any, one_call: bool) -> str:
    more = "" if one_call or form.mid is None else f"({write(form.mid)} call){'*' if form.repeats else '?'}"
    return f"start: {write(form.head)} call {more} {write(form.tail)}"


def _json(schema: Mapping[str, Any], separators: tuple[str, str]) -> str:
    item, key = separators
    spaced = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    own = schema.get("x-guidance")
    options = {**spaced, **own} if isinstance(own, Mapping) else spaced
    wanted = StructuredOutputs(json={**schema, "x-guidance": options})
    return f"%json {json.dumps(json_schema(wanted), ensure_ascii=False)}"


def _whole(head: str, own: ToolFormat | None) -> ToolFormat | None:
    """Return the model's own format for texts that begin with ``head``."""
    return replace(own, whole=True) if own is not None and head.lstrip().startswith(own.markers) else None


def _literal(text: str, tokens: Mapping[str, int]) -> str:
    """Return a text in a grammar, in which such tokens are tokens."""
    known = {token: f"<[{number}]>" for token, number in tokens.items()} | {_ID: _ANY_ID, _NUMBER: _ANY_NUMBER}
    pattern = re.compile("(" + "|".join(map(re.escape, sorted(known, key=len, reverse=True))) + ")")
    parts = [part for part in pattern.split(text) if part]
    return " ".join(known[part] if part in known else json.dumps(part, ensure_ascii=False) for part in parts)


def _parted(text: str, tokens: Mapping[str, int]) -> tuple[str, int | None, str]:
    """Return a text before its first token, that token, and the text behind it."""
    places = [(place, -len(token)) for token in tokens if (place := text.find(token)) >= 0]
    if not places:
        return text, None, ""
    begin, size = min(places)
    return text[:begin], tokens[text[begin : begin - size]], text[begin - size :]


def _pattern(text: str) -> str:
    """Return a text in a regular expression of a grammar."""
    return "".join(f"\\x{{{ord(letter):x}}}" for letter in text)


# -- reading a form off a template -----------------------------------------------------------------


def tokens_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the added tokens, special or not: texts that are one token each."""
    added = tokenizer.backend.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if token.content}


def call_form_of(
    tokenizer: Tokenizer, template: str, eos_ids: Collection[int], markers: Sequence[str], closer: str | None
) -> CallForm | ItemForm | None:
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
) -> CallForm | ItemForm | None:
    for make, ids in ((_json_form, _IDS), (_json_form, _NAMED_IDS), (_item_form, _IDS)):
        try:
            form = make(_Histories(template, ends, markers, closer, dict(named), ids))
        except (InvalidArgument, ValueError):
            continue
        known = (*_NAMES, "probed result", str(_USER["content"]))
        parts = (form.head, form.mid or "", form.tail)
        return None if any(one in text for text in parts for one in known) else form
    return None


class _Histories:
    """Renders histories with calls."""

    def __init__(
        self,
        template: str,
        ends: Sequence[str],
        markers: Sequence[str],
        closer: str | None,
        named: Mapping[str, str],
        ids: Sequence[str],
    ) -> None:
        self._template, self._ends, self._markers, self._closer, self._ids = template, ends, markers, closer, ids
        tool = {"name": "probed_other", "description": "It probes.", "parameters": {"type": "object", "properties": {}}}
        self._variables: dict[str, Any] = {"tools": [{"type": "function", "function": tool}], **named}
        self._prompt = self._rendered([_USER], asks=True)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], *, asks: bool = False) -> str:
        text = render_chat(self._template, messages, add_generation_prompt=asks, **self._variables)
        for id_ in self._ids:
            if id_ in _NAMED_IDS:
                text = text.replace(id_, id_.partition(":")[0] + ":" + _NUMBER)
            else:
                text = text.replace(id_, _ID)
        return text

    def calls(self, arguments: Sequence[Mapping[str, Any]], *, results: bool = True) -> str:
        """Return the rendered text from the first call on, of calls with such arguments.
        ``ValueError`` if it is not known where they begin."""
        probed = list(zip(self._ids, _NAMES, arguments, strict=False))
        calls = [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": dict(each)}}
            for id_, name, each in probed
        ]
        messages: list[dict[str, Any]] = [_USER, {"role": "assistant", "content": None, "tool_calls": calls}]
        if results:
            messages += [
                {"role": "tool", "tool_call_id": id_, "name": name, "content": "probed result"}
                for id_, name, _ in probed
            ]
        text = self._rendered(messages)
        if text.startswith(self._prompt):
            return text[len(self._prompt) :]
        # The history differs from the prompt, as with the beginning of a thought.
        pairs = zip(text, self._prompt, strict=False)
        common = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(text), len(self._prompt)))
        found = [text.find(marker, max(0, common - len(marker) + 1)) for marker in self._markers]
        return text[min(at for at in found if at >= 0) :]

    def head(self, text: str) -> str:
        """Return the text before the first name, without the end of reasoning."""
        if self._closer is None or self._closer not in text:
            return text
        return text.rpartition(self._closer)[2].lstrip()

    def tail(self, rest: str, last: str) -> str:
        """Return the text behind the last call: ``rest`` up to the end of a turn. If it has none,
        ``last``, which stands there without results, but for what ends every answer."""
        tail = _before(rest, self._ends)
        if tail is None:
            said = self._rendered([_USER, {"role": "assistant", "content": _SAID}])
            tail = _without_end(last, said.rpartition(_SAID)[2])
        return tail


def _json_form(histories: _Histories) -> CallForm:
    """Return a form whose arguments are JSON objects. ``ValueError`` if there is none."""
    pieces = _cut(histories.calls(_ARGUMENTS[:1]), 1)
    between, separators = pieces[1], pieces[-1]
    if not between or any(name in between for name in _NAMES):
        raise ValueError("nothing stands between a name and its arguments")
    tail = histories.tail(pieces[-2], _cut(histories.calls(_ARGUMENTS[:1], results=False), 1)[-2])
    head, mid, repeats = histories.head(pieces[0]), None, False
    try:
        for count in (2, 3):
            pieces = _cut(histories.calls(_ARGUMENTS[:count]), count)
            if set(pieces[1:-2:2]) != {between} or not pieces[-2].startswith(tail) or pieces[-1] != separators:
                break
            mid, repeats = pieces[2], count == 3 and pieces[2] == pieces[4]
    except (InvalidArgument, ValueError):
        pass
    return CallForm(head=head, between=between, mid=mid, tail=tail, repeats=repeats, separators=separators)


def _item_form(histories: _Histories) -> ItemForm:
    """Return a form whose arguments stand one by one. ``ValueError`` if there is none."""
    text, without = histories.calls([_ITEMS]), histories.calls([{}])
    found, separators = _items_in(text)
    if not without.startswith(text[: found.start("first")]):
        raise ValueError("a call without arguments begins in another way")
    rest, empty = found["rest"], without[found.start("first") :]
    size = 0
    while size < min(len(rest), len(empty)) and rest[-1 - size] == empty[-1 - size]:
        size += 1
    last = rest[: len(rest) - size]
    if last.rfind("<") > last.rfind(">"):  # a tag stays whole
        size -= rest.index(">", len(last)) + 1 - len(last)
        last = rest[: len(rest) - size]
    none, item = empty[: len(empty) - size], found["between"].removeprefix(last)
    if not found["between"].startswith(last) or (not last and not found["quote"]):
        raise ValueError("nothing ends a value")
    unended = histories.calls([_ITEMS], results=False)
    tail = histories.tail(rest[len(last) :], unended[found.start("rest") + len(last) :])
    form = ItemForm(
        head=text[: found.start("first") - len(_NAMES[0])],
        first=found["first"],
        equals=found["equals"],
        last=last,
        item=item,
        none=none,
        mid=None,
        tail=tail,
        repeats=True,
        separators=separators,
        quotes=bool(found["quote"]),
        python_words=found["true"] == "T",
    )
    form = _with_more_calls(form, histories)
    if not text.startswith(form.text([(_NAMES[0], _ITEMS)])):
        raise ValueError("the form writes another text")
    return replace(form, head=histories.head(form.head))


def _items_in(text: str) -> tuple[re.Match[str], tuple[str, str]]:
    """Return a match with the texts around ``_ITEMS`` as its groups, and the separators of JSON."""
    for separators in _SEPARATORS:
        written = re.escape(json.dumps(_ITEMS["probed_a"], separators=separators))
        found = re.match(
            rf".*?{_NAMES[0]}(?P<first>.*?)probed_a(?P<equals>.+?){written}(?P<between>.+?)probed_b(?P=equals)"
            rf'(?P<quote>"?)probed text(?P=quote)(?P=between)probed_c(?P=equals)7(?P=between)probed_d(?P=equals)'
            rf"(?P<true>[Tt])rue(?P=between)probed_e(?P=equals)(?:null|None)(?P<rest>.*)",
            text,
            re.DOTALL,
        )
        if found is not None:
            return found, separators
    raise ValueError("the arguments are not there one by one")


def _with_more_calls(form: ItemForm, histories: _Histories) -> ItemForm:
    """Return a form with what stands between calls, if a turn may have several."""
    probed = list(zip(_NAMES, (_ITEMS, {}, _ITEMS), strict=True))
    begin = len(replace(form, tail="").text(probed[:1]))
    with_mid = form
    for count in (2, 3):
        try:
            text = histories.calls([arguments for _, arguments in probed[:count]])
            if count == 2:
                with_mid = replace(form, mid=text[begin : text.index(_NAMES[1], begin)], repeats=False)
        except (InvalidArgument, ValueError):
            break
        if not text.startswith(with_mid.text(probed[:count])):
            return form if count == 2 else with_mid
        form = replace(with_mid, repeats=count == 3)
    return form


def _cut(text: str, count: int) -> tuple[Any, ...]:
    """Return the texts before, between and behind names and arguments, and the separators of
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
