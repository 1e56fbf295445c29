"""The chat of a session: new messages to tokens, and the history of the next turn ahead of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import FailedPrecondition, InvalidArgument
from quire.base.hints import CacheHints
from quire.base.outputs import RequestOutput
from quire.base.sampling_params import SamplingParams
from quire.base.token_history import common_prefix
from quire.base.types import BASE
from quire.engine.request_outputs import prefix_output
from quire.sessions import generation
from quire.sessions.chat_turns import Asked, ReadAnswer, TemplateInputs, next_turn_ids, parts_from
from quire.sessions.live_sequence import LiveSequence
from quire.text.chat_prompts import ChatPrompt, encode_chat


def ask(
    live: LiveSequence,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    answer: ReadAnswer | None,
    inputs: TemplateInputs,
) -> tuple[Asked, NDArray[np.int64]]:
    """Return the messages with their turns, and all tokens of the session with them. ``params``:
    checked ones (``generation.checked_params``)."""
    with live.engine.lock:
        live.require_idle("chat")
        if not isinstance(messages, (list, tuple)) or not messages:
            raise InvalidArgument(field="messages", given=messages, allowed="a list of at least one new message")
        tokenizer, ids = live.require_tokenizer("chat"), live.given_ids
        turns, checks = live.turns.up_to(len(ids)), live.engine.checks_of(live.branch)
    # Without the lock: other threads work while a long conversation is rendered and tokenised.
    asked = turns.ask(messages, ids, tokenizer, answer, inputs)
    inside = tokenizer.has_text(np.array(ids[: asked.start], dtype=np.int64))
    rendered = encode_chat(
        tokenizer,
        asked.all_messages,
        inputs.variables,
        tools=inputs.tools,
        text_limit=checks.text_limit,
        inside=inside,
    )
    tokens = np.array([*ids[: asked.start], *rendered], dtype=np.int64)
    checks.history(tokens)
    with live.engine.lock:
        generation.check(live, "chat", tokens.size, params)
        if live.given_ids != ids:
            raise FailedPrecondition("chat: the session was changed by another thread meanwhile; call again")
    shared = common_prefix(tokens, np.array(ids, dtype=np.int64))
    return asked.in_tokens(tokens, shared, tokenizer), tokens


def messages(live: LiveSequence) -> list[Mapping[str, Any]]:
    """Return the messages of all turns, without the lock."""
    turns, ids = live.turns, live.given_ids
    if not turns:
        return []
    return turns.ask([], ids, live.require_tokenizer("messages"), None, turns.inputs).all_messages


def answer_messages(
    live: LiveSequence,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    answer: ReadAnswer | None,
    inputs: TemplateInputs,
    hints: CacheHints,
) -> RequestOutput:
    """Add messages and generate their answer."""
    asked, tokens = ask(live, messages, params, answer, inputs)
    with live.engine.lock:
        live.require_idle("chat")
        request = generation.submit(live, tokens, params, hints=hints)
    try:
        return generation.result(live, request)
    finally:
        live.turns.answered(asked, request, len(live))


def prefetch_next_turn(live: LiveSequence, most: int | None) -> RequestOutput | None:
    """Run the history as the next turn's template writes it; None: there is nothing to run."""
    verb = "prefetch_next_turn"
    with live.engine.lock:
        branch = live.require_open(verb)
        tokenizer, ids = live.require_tokenizer(verb), branch.tokens.ids.copy()
        turns, longest = live.turns.up_to(ids.size), live.engine.checks_of(branch).text_limit
        plain = branch.runs == BASE.then(0, branch.adapter) and not (ids < 0).any()
        if not (plain and turns.end_with_answer(ids.size)) or branch.modified or branch.window is not None:
            return None
        inputs, key, adapter = turns.inputs, branch.key, branch.adapter
        asked = turns.ask([], ids.tolist(), tokenizer, None, inputs)
    chat = ChatPrompt(tokenizer, asked.all_messages, inputs.tools, inputs.variables, text_limit=longest)
    rendered = next_turn_ids(
        lambda given: chat.render(given, inputs.tools, asks=False),
        asked.all_messages,
        chat.texts,
        inside=tokenizer.has_text(ids[: asked.start]),
    )
    history = np.concatenate((ids[: asked.start], rendered))
    if not parts_from(history, ids):
        return None
    request = live.engine.submit_prefix(history, key=key, adapter=adapter, only_idle=True, most=most)
    live.engine.run([request])
    return prefix_output(request, tokenizer)
