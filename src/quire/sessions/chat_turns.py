"""The turns of a chat: its messages, and the places of these among a session's tokens.

A chat template may write an answer into later prompts in another way than the model wrote it: most
leave the reasoning out. Then the state of the answer is of no use to the next turn, unless the
answer has been run again as the template writes it (``next_turn_ids``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import FailedPrecondition
from quire.base.token_history import Ids, common_prefix
from quire.engine.request import Request
from quire.statefile.schema import Fault, StoredChat, fitted
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.spelled_tokens import SpelledTokens
from quire.text.text_spans import pieces_of
from quire.text.tokenizer import Tokenizer

ReadAnswer: TypeAlias = Callable[[str], Mapping[str, Any]]
"""From the text of an answer to its message, whose content is text."""


PROBES = ("a", "\n\n[")
"""Beginnings of a next message. Tokens before it that differ between these belong to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateInputs:
    """The inputs of a chat template beside the messages."""

    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A message of a session's chat."""

    end: int
    """Tokens of the session up to its end; for given messages, up to the beginning of the
    answer."""
    message: Mapping[str, Any]
    is_answer: bool = False
    """Whether the model wrote it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Messages that are to be answered."""

    before: Sequence[Turn]
    messages: Sequence[Mapping[str, Any]]
    start: int
    """Where in the session the first turn begins."""
    read: ReadAnswer | None
    """None: the text of the answer is its content."""
    inputs: TemplateInputs

    @property
    def all_messages(self) -> list[Mapping[str, Any]]:
        """Return the messages for the template: the messages of earlier turns, then the new
        ones."""
        return [*(turn.message for turn in self.before), *self.messages]

    def in_tokens(self, tokens_T: Ids, shared: int, tokenizer: Tokenizer) -> Asked:
        """Return the same with the ends of earlier turns in ``tokens_T``, which the template wrote
        anew and whose first ``shared`` tokens the session has.

        A turn behind these is found by its content, at the first place behind the turn before it.
        So an end may be too early, and is never too late or behind the new messages."""
        if all(turn.end <= shared for turn in self.before):
            return self
        known = max((turn.end for turn in self.before if turn.end <= shared), default=self.start)
        table = tokenizer.token_bytes
        pieces = pieces_of(table, tokens_T[known:]) if table.concatenates else []
        whole, ends_T = b"".join(pieces), np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        found, at = list(self.before), 0
        given: list[int] = []  # turns since the last answer, which end where the next one begins
        for index, turn in enumerate(self.before):
            if turn.end <= shared:
                continue
            place = _find(whole, _text_of(turn.message), at)
            at = place.stop
            given.append(index)
            if turn.is_answer:
                end = known + int(np.searchsorted(ends_T, place.start, side="right"))
                for one in given[:-1]:
                    found[one] = replace(found[one], end=end)
                given = []
            stop = int(np.searchsorted(ends_T, at)) + 1 if at else 0
            found[index] = replace(turn, end=known + stop)
        return replace(self, before=found)


class ChatTurns:
    """All turns that a session holds."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._cut = False
        """Whether the tokens after the last turn are a rewind's rest of messages, and so of no
        turn."""
        self._start: int | None = None
        """Where the first turn began."""
        self.inputs = TemplateInputs()
        """Those of the last answer."""

    def __bool__(self) -> bool:
        """Return True if a chat has begun."""
        return bool(self._turns) or self._start is not None

    def written(self) -> str | None:
        """Return the turns in JSON; None if there are none. ``TypeError`` and ``ValueError`` for a
        message that is none."""
        if not self:
            return None
        listed = [[turn.end, turn.message, turn.is_answer] for turn in self._turns]
        found = {"turns": listed, "cut": self._cut, "start": self._start}
        if self.inputs != TemplateInputs():
            found["inputs"] = asdict(self.inputs)
        return json.dumps(found, default=dict)

    @classmethod
    def read(cls, written: str | bytes | None) -> ChatTurns:
        """Return the turns that ``written`` gave. ``Fault`` for anything else."""
        turns = cls()
        if written is None:
            return turns
        try:
            found = json.loads(written)
        except (ValueError, RecursionError) as error:
            raise Fault(f"chat is no JSON ({error})") from None
        fitted(found, StoredChat, "chat")
        turns._turns = [Turn(end=end, message=one, is_answer=answer) for end, one, answer in found["turns"]]
        for index, turn in enumerate(turns._turns):
            if turn.is_answer and isinstance(turn.message.get("content"), list):
                raise Fault(f"chat.turns[{index}][1].content is a list; the text of an answer is expected")
        turns._cut, turns._start = found["cut"], found["start"]
        turns.inputs = TemplateInputs(**found.get("inputs", {}))
        return turns

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        return [turn.message for turn in self._turns]

    @property
    def start(self) -> int | None:
        """Return the number of tokens before the first turn; None without a chat."""
        return self._start

    @property
    def least_length(self) -> int:
        """Return the number of tokens that a session with these turns has at least."""
        return max(self._start or 0, *(turn.end for turn in self._turns), 0)

    def up_to(self, length: int) -> ChatTurns:
        """Return the turns of a fork of the first ``length`` tokens."""
        copy = ChatTurns()
        copy._turns, copy._start, copy._cut = list(self._turns), self._start, self._cut
        copy.inputs = self.inputs
        copy.cut(length)
        return copy

    def cut(self, length: int) -> None:
        """Drop the turns that end after ``length`` tokens, the session's new length."""
        kept = [turn for turn in self._turns if turn.end <= length]
        behind = bool(kept) and kept[-1].is_answer and length > kept[-1].end
        self._cut = behind and (self._cut or len(kept) < len(self._turns))
        self._turns = kept
        if self._start is not None and self._start > length:
            self._start = None

    def edited(self, ids_T: Ids, start: int, stop: int, new_T: Ids, tokenizer: Tokenizer | None) -> ChatTurns:
        """Return the turns of a session of the tokens ``ids_T`` after ``start..stop`` have become
        ``new_T``. ``FailedPrecondition`` unless these stand before or behind all turns, or in the
        content of one message."""
        first = 0 if self._start is None else self._start
        last = self._turns[-1].end if self._turns else first
        shift, found = new_T.size - (stop - start), self.up_to(len(ids_T))
        if start >= last:
            return found
        if stop <= first:
            found._start = first + shift
        else:
            found._turns = self._with_content(ids_T, start, stop, new_T, tokenizer, first)
        found._turns = [replace(turn, end=turn.end + shift) if turn.end > start else turn for turn in found._turns]
        return found

    def _with_content(
        self, ids_T: Ids, start: int, stop: int, new_T: Ids, tokenizer: Tokenizer | None, first: int
    ) -> list[Turn]:
        """Return the turns with the content of that one replaced in which ``start..stop`` is. Only
        the last one's end is sure: what came before may have been tokenised anew."""
        turns, last, found = list(self._turns), self._turns[-1].end, []
        texts = [_text_of(turn.message) for turn in turns]
        if first <= start and stop <= last and tokenizer is not None:
            table = tokenizer.token_bytes
            before, gone, after, new = (
                b"".join(pieces_of(table, part))
                for part in (ids_T[first:start], ids_T[start:stop], ids_T[stop:last], new_T)
            )
            # Tokens at the ends may also hold what the template writes around the content.
            same = _same(gone, new)
            before, gone, new = before + gone[:same], gone[same:], new[same:]
            same = _same(gone[::-1], new[::-1])
            gone, new, after = gone[: len(gone) - same], new[: len(new) - same], gone[len(gone) - same :] + after
            whole, at, quoted = before + gone + after, len(before), list[range]()
            for text in sorted(set(texts) - {b""}, key=len, reverse=True):
                places = [one.start() for one in re.finditer(re.escape(text), whole)]
                # A longer message may quote this one.
                places = [place for place in places if not any(place in one for one in quoted)]
                if len(places) != texts.count(text):
                    continue  # it is not known which is which
                quoted += [range(place, place + len(text)) for place in places]
                for number, place in enumerate(places):
                    if place <= at and at + len(gone) <= place + len(text):
                        edited = text[: at - place] + new + text[at - place + len(gone) :]
                        found.append((text, number, edited.decode(errors="replace")))
        if len(found) != 1:
            raise FailedPrecondition(
                f"tokens {start}..{stop - 1} are not in the content of one message of the session's chat, which goes on by its "
                "messages; edit part of one message's content, or rewind to before it"
            )
        text, number, content = found[0]
        index = [index for index, one in enumerate(texts) if one == text][number]
        turns[index] = replace(turns[index], message={**turns[index].message, "content": content})
        return turns

    def end_with_answer(self, length: int) -> bool:
        """Return whether a session of this length ends with an answer of the model."""
        return bool(self._turns) and not self._cut and self._turns[-1].is_answer and self._turns[-1].end == length

    def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        ids: Sequence[int],
        tokenizer: Tokenizer,
        read: ReadAnswer | None,
        inputs: TemplateInputs,
    ) -> Asked:
        """Return new messages as an addition to a session of the tokens ``ids``; change nothing."""
        start = len(ids) if self._start is None else self._start
        before = self._all(ids, tokenizer)
        return Asked(before=before, messages=list(messages), start=start, read=read, inputs=inputs)

    def _all(self, ids: Sequence[int], tokenizer: Tokenizer) -> list[Turn]:
        """Return all turns, the last answer with the tokens after it."""
        if not self._turns or self._cut or self._turns[-1].end == len(ids):
            return list(self._turns)
        last = self._turns[-1]
        # Embeddings, below 0, have no text.
        text = IncrementalDetokenizer(tokenizer, [token_id for token_id in ids[: last.end] if token_id >= 0])
        pieces = [text.push(token_id) for token_id in ids[last.end :] if token_id >= 0]
        added = "".join([*pieces, text.finish()])
        if not last.is_answer:
            return [*self._turns, Turn(end=len(ids), message={"role": "assistant", "content": added}, is_answer=True)]
        message = {**last.message, "content": (last.message.get("content") or "") + added}
        return [*self._turns[:-1], Turn(end=len(ids), message=message, is_answer=True)]

    def answered(self, asked: Asked, request: Request, length: int) -> None:
        """Record the answer of a finished request, or after an error that there is none. The
        session has ``length`` tokens now."""
        if not request.succeeded:
            self.cut(length)
            return
        text = request.output.text
        message = {"role": "assistant", "content": text} if asked.read is None else asked.read(text)
        self._start, self._cut, self.inputs = asked.start, False, asked.inputs
        self._turns = [
            *asked.before,
            *(Turn(end=request.asked.num_prompt, message=one) for one in asked.messages),
            Turn(end=length, message=message, is_answer=True),
        ]


def _same(one: bytes, other: bytes) -> int:
    """Count the equal bytes at the beginning."""
    return common_prefix(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))


def _text_of(message: Mapping[str, Any]) -> bytes:
    """Return the content of a message as templates may write it: stripped; empty if it is none."""
    content = message.get("content")
    return content.strip().encode(errors="replace") if isinstance(content, str) else b""


def _find(whole: bytes, content: bytes, at: int) -> range:
    """Return the first place of a content from ``at`` on; if a template leaves its beginning out,
    of its last line. The empty range at ``at`` if it is nowhere."""
    for text in (content, content.rsplit(b"\n", 1)[-1]):
        if text and (start := whole.find(text, at)) >= 0:
            return range(start, start + len(text))
    return range(at, at)


def next_turn_ids(
    render: Callable[[Sequence[Mapping[str, Any]]], str],
    messages: Sequence[Mapping[str, Any]],
    texts: SpelledTokens | Tokenizer,
    *,
    inside: bool = False,
) -> NDArray[np.int64]:
    """Return the tokens up to where the next message begins. ``messages`` ends with the answer,
    whose calls, if it has any, are answered next. ``texts`` tokenises what ``render`` returns.
    ``inside``: other text stands before them. Errors are as for ``render``."""
    found: NDArray[np.int64] | None = None
    for probe in PROBES:
        text = render([*messages, _next_message(messages[-1], probe)])
        ids = np.array(texts.encode_rendered(text, inside=inside), dtype=np.int64)
        found = ids if found is None else found[: common_prefix(found, ids)]
    assert found is not None
    return found


def _next_message(answer: Mapping[str, Any], content: str) -> dict[str, Any]:
    calls = answer.get("tool_calls")
    if not calls:
        return {"role": "user", "content": content}
    name = calls[0].get("function", {}).get("name")
    return {"role": "tool", "tool_call_id": calls[0].get("id"), "name": name, "content": content}


def parts_from(history: NDArray[np.int64], computed: NDArray[np.int64]) -> bool:
    """Return whether a history continues otherwise than the computed tokens."""
    return common_prefix(history, computed) < min(history.size, computed.size)
