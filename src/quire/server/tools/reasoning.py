"""Separation of a model's reasoning from its answer.

Models of some families think between two markers at the beginning of a message (DeepSeek R1, Qwen3
and GLM: ``<think>`` and ``</think>``; Magistral: ``[THINK]`` and ``[/THINK]``; Command A:
``<|START_THINKING|>`` and ``<|END_THINKING|>``). With some templates the prompt ends with the first
marker, and the message begins inside the reasoning (``ReasoningFormat.opened_by``).

Rules for every text:

- Reasoning stands at the beginning only. Markers anywhere else are content.
- Reasoning that was cut short is reasoning, with no content.
- White space around the reasoning is dropped. A message without reasoning is unchanged content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.server.tools.reader import Delta, MessageParser, overlap

_MARKERS = (
    ("[THINK]", "[/THINK]"),
    ("<think>", "</think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Pairs of markers of models that think."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningFormat:
    """The markers of a model's reasoning."""

    opener: str
    closer: str
    opened: bool = False
    """Whether prompts end inside the reasoning by the template; ``opened_by`` is exact."""

    def opened_by(self, prompt: str) -> bool:
        """Return whether a message after ``prompt``, with special tokens, begins in reasoning."""
        return prompt.rstrip().endswith(self.opener)

    def closed_by(self, prompt: str) -> bool:
        """Return whether ``prompt`` ends behind the reasoning, so that there is none: thinking is
        switched off."""
        return prompt.rstrip().endswith(self.closer)


class StreamingReasoning(MessageParser):
    """A parser of one message into reasoning and content, as its text arrives."""

    def __init__(self, format: ReasoningFormat, opened: bool | None = None) -> None:
        """Begin a message. ``opened``: whether that is inside the reasoning; None: the template
        decides."""
        super().__init__()
        self._format, self._opened = format, format.opened if opened is None else opened
        self._state: Literal["start", "reasoning", "content"] = "start"
        self._pending = ""
        """Text that may become a marker; shorter than one."""
        self._space: list[str] = []
        """White space whose meaning depends on the text after it."""
        self._begun = False
        """Whether there was anything but white space since the last marker."""

    def _read(self, text: str, *, last: bool) -> None:
        text, self._pending = self._pending + text, ""
        if self._state == "start":
            text = self._start(text, last=last)
        if self._state == "reasoning":
            thought, closer, rest = text.partition(self._format.closer)
            if not closer and not last and (held := overlap(thought, (self._format.closer,))):
                thought, self._pending = thought[:-held], thought[-held:]
            if trimmed := self._trimmed(thought):
                self._deltas.append(Delta(reasoning=trimmed))
            text = ""
            if closer:
                self._state, self._begun, self._space, text = "content", False, [], rest
        if self._state == "content":
            if not self._begun:
                text = text.lstrip()
            if text:
                self._begun = True
                self._deltas.append(Delta(content=text))

    def _start(self, text: str, *, last: bool) -> str:
        """Leave the start once the text tells where to go. Return the text to read there."""
        begin = text.lstrip()
        if not last and len(begin) < len(self._format.opener) and self._format.opener.startswith(begin):
            self._space.append(text[: len(text) - len(begin)])
            self._pending = begin
            return ""
        if begin.startswith(self._format.opener):
            self._state, self._space = "reasoning", []
            return begin.removeprefix(self._format.opener)
        if self._opened:
            self._state, self._space = "reasoning", []
            return begin
        self._state, self._begun = "content", True
        whole = "".join([*self._space, text])
        self._space = []
        return whole

    def _trimmed(self, thought: str) -> str:
        """Add reasoning without white space around it. White space at its end waits for more."""
        if not self._begun:
            thought = thought.lstrip()
        trimmed = thought.rstrip()
        if not trimmed:
            self._space.append(thought)
            return ""
        whole = "".join([*self._space, trimmed])
        self._begun, self._space = True, [thought[len(trimmed) :]]
        return whole


def reasoning_for(chat_template: str) -> ReasoningFormat | None:
    """Return the markers of reasoning in a model's chat template; None if there are none."""
    # The template's text at the beginning of the model's turn.
    turn = chat_template.rpartition("add_generation_prompt")[2]
    for opener, closer in _MARKERS:
        if opener in chat_template or closer in chat_template:
            opened = "add_generation_prompt" in chat_template and opener in turn and closer not in turn
            return ReasoningFormat(opener=opener, closer=closer, opened=opened)
    return None
