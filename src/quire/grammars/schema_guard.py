"""JSON schemas as llguidance gets them: what it would get wrong is rewritten, or refused by name.

llguidance computes with floats, takes some excluded bounds for included ones, and does not see that
a name is written twice, or with escapes. A rewritten schema allows nothing that the given one does
not. It leaves out numbers within the 15th digit of a bound (within the last 10 of one beyond
2**53), and the character NUL where a pattern excludes characters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, localcontext
from typing import Any

from quire.base.errors import InvalidArgument
from quire.grammars.closed_objects import reached
from quire.grammars.schema_nodes import schemas, token

EXACT = 2**53
"""Whole numbers up to this one are floats of their own."""
DIGITS = 15
"""Decimal digits that survive a float."""
PLACES = 22
"""Most decimal places: beyond them llguidance's reader of numbers rounds."""
FARTHEST = 2**63 - 1024
"""The largest float that is a signed 64-bit integer. Bounds beyond it are moved to it."""
COARSE = 10**10
"""What bounds of numbers beyond ``EXACT`` are multiples of."""
MAX_CHARACTERS = 400
"""Most characters of a number with a point or an exponent."""
MAX_SPELLED, SPELLING = 1_000_000, 40
"""Most characters of a pattern of other names, and those that one character of a name adds."""
LONGEST_MULTIPLE = 2**32
"""llguidance keeps digits of ``multipleOf`` in 32 bits, and their products too."""

_TOLD_APART = f"whole numbers up to 2**53 and numbers of {DIGITS} digits can, and so can all strings"
_EXACTLY = Context(prec=2 * MAX_CHARACTERS)
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
_DAY = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP})"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
FORMATS: Mapping[str, str] = {"date": f"^{_DAY}$", "time": f"^{_TIME}$", "date-time": f"^{_DAY}[tT]{_TIME}$"}
"""Formats by their patterns, where llguidance's own allow what no clock or calendar shows."""

_ESCAPE = re.compile(r"\\(?:[pP](?:\{[^}]*\}|.)|x\{[^}]*\}|u\{[^}]*\}|x..|u....|.)", re.DOTALL)
_WITHOUT_NUL = r"&&[^\x00]]"
_NUL = re.compile(r"\\(?:x\{?0+\}?|u\{?0+\}?|0)\Z|\0")
_POSIX = re.compile(r"\[:\^?[a-z]+:\]")
_WIDE = re.compile(r"\\[xu0pPc]|\[:|[\0-\x1f]")
_DIALECTS = re.compile(r"&&|--|~~|\[")


class Written(float):
    """A number of a JSON text, with the digits that stand there."""

    text: str

    def __new__(cls, text: str) -> Written:
        made = super().__new__(cls, text)
        made.text = text
        return made


_DECODER = json.JSONDecoder(parse_float=Written)


def parsed(text: str) -> Any:
    """Return a parsed schema that still knows the digits of its numbers."""
    return _DECODER.decode(text)


def schema_at(text: str, place: int) -> tuple[Any, int]:
    """Return the schema that begins at ``place`` as ``parsed`` does, and where it ends.
    ``ValueError`` if there is no JSON."""
    return _DECODER.raw_decode(text, place)


def guard(schema: object) -> None:
    """Rewrite a ``parsed`` schema in place. ``InvalidArgument`` names what cannot be held to. A
    rewritten schema stays as it is when it is guarded again."""
    multiples = {node["multipleOf"] for _, node in schemas(schema) if isinstance(node.get("multipleOf"), int | float)}
    for place, node in list(schemas(schema)):
        with localcontext(_EXACTLY):
            for word in ("const", "enum"):
                if word in node:
                    _check_values(node[word], f"{place}/{word}")
            _move_bounds(node, place)
            if len(multiples) > 1:
                _check_multiples(node, place, schema)
        _name_others(node, place)
        if isinstance(pattern := node.get("pattern"), str):
            node["pattern"] = _exact_pattern(pattern, place)
        if isinstance(named := node.get("patternProperties"), dict):
            node["patternProperties"] = {_exact_pattern(key, place): value for key, value in named.items()}
        pattern = FORMATS.get(node["format"]) if isinstance(node.get("format"), str) else None
        if pattern is not None:
            del node["format"]
            if "pattern" in node and isinstance(node.get("allOf", []), list):
                node.setdefault("allOf", []).append({"pattern": pattern})
            else:
                node["pattern"] = pattern


def _refused(place: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"structured_outputs.json: {place or 'the schema'}: {why}", field="structured_outputs.json")


# -- numbers ---------------------------------------------------------------------------------------


def _number(value: object, place: str) -> Decimal | None:
    """Return a number of a schema; None for other values."""
    if isinstance(value, Written):
        mantissa = value.text.lower().partition("e")[0]
        if math.isinf(value) or len(value.text) > MAX_CHARACTERS or (not value and mantissa.strip("-0.")):
            raise _refused(place, f"the number {value.text:.40} is beyond what a float holds")
        return Decimal(value.text)
    return Decimal(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _check_values(value: object, place: str) -> None:
    """Refuse numbers that are others once they were read as floats and printed."""
    left = [(place, value)]
    while left:
        place, one = left.pop()
        if isinstance(one, list):
            left += [(f"{place}/{index}", item) for index, item in enumerate(one)]
        elif isinstance(one, dict):
            left += [(f"{place}/{token(name)}", item) for name, item in one.items()]
        elif (number := _number(one, place)) is not None:
            _, digits, exponent = number.normalize(_EXACTLY).as_tuple()
            if isinstance(one, int) and abs(one) <= FARTHEST:
                exact = float(one) == one
            else:
                exact = len(digits) <= DIGITS and abs(int(exponent)) <= PLACES
            if not exact:
                raise _refused(
                    place, f"the number {getattr(one, 'text', one)} cannot be told from its neighbours; {_TOLD_APART}"
                )


def _move_bounds(node: dict[str, Any], place: str) -> None:
    """Replace the bounds of numbers by such as floats have, on the inner side."""
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    whole = "integer" in kinds and "number" not in kinds
    given: list[tuple[Decimal, bool]] = []
    """The lower bound and the negated upper one, and whether the bound itself is excluded."""
    moved: list[tuple[Decimal, bool]] = []
    for word, other, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        bound, beyond = _number(node.get(word), place), _number(node.get(other), place)
        if node.get(other) is True:  # of draft 4
            bound, beyond = None, bound
        wanted = [(one * sign, one is beyond) for one in (bound, beyond) if one is not None]
        if wanted:
            given.append(max(wanted))
            moved.append(max(_inward(one, whole, is_open) for one, is_open in wanted))
            end, is_open = moved[-1]
            node.pop(word, None)
            node.pop(other, None)
            end *= sign
            node[other if is_open else word] = int(end) if end == end.to_integral_value() else float(end)
    if len(moved) == 2 and _is_empty(*moved) and not _is_empty(*given):
        raise _refused(place, f"no number between its bounds can be told from its neighbours; {_TOLD_APART}")


def _is_empty(low: tuple[Decimal, bool], high: tuple[Decimal, bool]) -> bool:
    return low[0] > -high[0] or (low[0] == -high[0] and (low[1] or high[1]))


def _inward(bound: Decimal, whole: bool, is_open: bool) -> tuple[Decimal, bool]:
    """Return the least lower bound within ``bound`` that is exact as a float, and whether it is
    itself excluded. Of an excluded bound at or above 0 the next number is the bound: llguidance
    includes such a one if the upper bound has the same whole part."""
    if bound > FARTHEST:
        return bound, is_open  # llguidance refuses it
    if bound < -FARTHEST:
        return Decimal(-FARTHEST if whole else -(FARTHEST // COARSE * COARSE)), False
    if whole:
        rounding = ROUND_FLOOR if is_open else ROUND_CEILING
        least = int(bound.to_integral_value(rounding)) + is_open
        nearest = float(least)
        return Decimal(int(nearest if nearest >= least else math.nextafter(nearest, math.inf))), False
    if abs(bound) > EXACT:
        # A multiple of this power of ten is exact, also as a whole number.
        return _ceiling(bound + is_open, Decimal(COARSE)), False
    unit = Decimal(1).scaleb(max(bound.adjusted() - DIGITS + 1, -PLACES) if bound else -DIGITS)
    moved = bound if bound == bound.to_integral_value() else _ceiling(bound, unit)
    if not is_open or moved > bound:
        return moved, False
    return (moved, True) if moved < 0 else (moved + unit, False)


def _ceiling(number: Decimal, unit: Decimal) -> Decimal:
    return (number / unit).to_integral_value(ROUND_CEILING) * unit


def _check_multiples(node: dict[str, Any], place: str, root: object) -> None:
    """Refuse several ``multipleOf`` of one number whose common multiple llguidance cannot hold."""
    if not any(word in node for word in ("allOf", "anyOf", "oneOf", "$ref")):
        return
    found = {value for one in reached(node, root) if (value := _number(one.get("multipleOf"), place))}
    if len(found) < 2:
        return
    exponents = [int(value.normalize(_EXACTLY).as_tuple().exponent) for value in found]
    places = max(0, -min(exponents))
    if places > PLACES or math.prod(abs(value).scaleb(places) for value in found) >= LONGEST_MULTIPLE:
        raise _refused(
            place, "the multipleOf of its parts have too many digits together; their product must be below 2**32"
        )


# -- names -----------------------------------------------------------------------------------------


def _name_others(node: dict[str, Any], place: str) -> None:
    """Give the members that an object does not list by a pattern. llguidance applies patterns to
    what a name means, and takes a name for another one if it is only written with escapes."""
    others, patterns = node.get("additionalProperties", True), node.get("patternProperties")
    listed = _dict_of(node, "properties")
    required = {str(name) for name in node["required"]} if isinstance(node.get("required"), list) else set()
    least = node.get("minProperties")
    if isinstance(least, int) and (others is not False or patterns) and least - len(required) > 1:
        raise _refused(
            place,
            f"minProperties is {least}, but a name that the schema does not list could be written twice; list the names in "
            "properties and required, or ask for no more than one beyond those required",
        )
    if others is False or not (patterns or listed or required):
        return
    if patterns:
        raise _refused(
            place,
            "additionalProperties must be false beside patternProperties: a name written with escapes would pass its "
            "pattern by; give the other names a pattern too",
        )
    all_names = others is True or others == {}
    if not all_names and sum(len(name) * (len(name) + SPELLING) for name in listed) > MAX_SPELLED:
        raise _refused(
            place,
            f"additionalProperties is a schema, and its {len(listed)} properties have {sum(map(len, listed))} characters, too "
            "many to tell other names from; list fewer, or set additionalProperties to true or false",
        )
    node["patternProperties"] = {"(?s).*" if all_names else _none_of(listed): others}
    node["additionalProperties"] = False


def _dict_of(node: dict[str, Any], word: str) -> dict[str, Any]:
    value = node.get(word)
    return value if isinstance(value, dict) else {}


def _none_of(names: Iterable[str]) -> str:
    """Return a pattern of all strings but some."""
    after: dict[str, set[str]] = {"": set()}
    for name in names:
        for end, letter in enumerate(name):
            after.setdefault(name[:end], set()).add(letter)
            after.setdefault(name[: end + 1], set())
    given, ways = set(names), list[str]()
    for beginning, letters in after.items():
        spelled = "".join(f"\\x{{{ord(letter):x}}}" for letter in sorted(letters))
        other = f"[^{spelled}](?s:.*)" if letters else "(?s:.+)"
        ways.append(re.escape(beginning) + (other if beginning in given else f"(?:{other})?"))
    return f"^(?:{'|'.join(ways)})$"


# -- patterns --------------------------------------------------------------------------------------


def _exact_pattern(pattern: str, place: str) -> str:
    """Return a pattern whose classes lack NUL if they may have all other control characters. To a
    class with all of them llguidance adds quotes, backslashes and DEL."""
    pieces, at = list[str](), 0
    while at < len(pattern):
        if (end := _end_of_rewritten(pattern, at)) > 0:
            pieces.append(pattern[at:end])
            at = end
            continue
        end = at + 1
        if pattern[at] == "\\":
            end = found.end() if (found := _ESCAPE.match(pattern, at)) else len(pattern)
        elif pattern[at] == "[":
            end = _end_of_class(pattern, at)
            if end < 0:
                return pattern  # llguidance says so
        piece = pattern[at:end]
        if piece[0] == "[" and _DIALECTS.search(_POSIX.sub("", _ESCAPE.sub("", piece[1:]))):
            raise _refused(
                place,
                f"the class {piece:.60} of its pattern means different things to different readers; write a backslash before "
                "each of [ & - ~ in it",
            )
        if _NUL.match(piece):
            raise _refused(place, "its pattern asks for the character NUL, which strings here do not have")
        if piece[:2] in ("\\p", "\\P", "[^") or (piece[0] == "[" and _WIDE.search(piece)):
            piece = f"[{piece}{_WITHOUT_NUL}"
        pieces.append(piece)
        at = end
    return "".join(pieces)


def _end_of_rewritten(pattern: str, at: int) -> int:
    """Return the end of the class at ``at`` if that lacks NUL already, -1 if not."""
    if not pattern.startswith(("[[", "[\\"), at):
        return -1
    found = _ESCAPE.match(pattern, at + 1)
    end = found.end() if found else _end_of_class(pattern, at + 1)
    return end + len(_WITHOUT_NUL) if end > 0 and pattern.startswith(_WITHOUT_NUL, end) else -1


def _end_of_class(pattern: str, at: int) -> int:
    """Return the end of the class that begins at ``at``, -1 if it has none."""
    at += 2 if pattern.startswith("^", at + 1) else 1
    at += pattern.startswith("]", at)  # a first one is literal
    while at < len(pattern):
        if found := (_ESCAPE.match(pattern, at) or _POSIX.match(pattern, at)):
            at = found.end()
            continue
        if pattern[at] == "]":
            return at + 1
        at += 1
    return -1
