"""``Session.edit``: afterwards a session is what it would be if it had always had these tokens; a
call that is refused, fails or is cancelled leaves it as it was.

Edits at random are in the suites of conversations, of adapters, of embeddings and of interrupts.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.test_media import image, rows_of
from tests.small_llms import Checkpoint, MakeLLM, attention_layer, check, engine_of, greedy, random_tokens, record

from quire import LLM, AsyncLLM, Session
from quire.base.errors import Cancelled, FailedPrecondition, InvalidArgument, QuireError, ResourceExhausted, Unsupported
from quire.base.outputs import EditMode
from quire.engine.page_use import PageUse
from quire.text.text_spans import TextPlace, place_of

from .test_session_chat import assistant, chatty, folder, user  # noqa: F401

PROMPT = random_tokens(40)
NEW = random_tokens(5, seed=4)


def state_of(session: Session) -> tuple[Any, ...]:
    state = session._branch
    return session.tokens, state.runs, state.computed, state.seq, state.origin, session.pinned, state.busy


def goes_on(session: Session, checkpoint: Checkpoint, tokens: list[int]) -> None:
    assert session.tokens == tokens
    exact_TV, bound = checkpoint.exact_logits(tokens)
    assert float((session.logits().double() - exact_TV[-1]).abs().max()) <= bound
    assert checkpoint.continues(tokens, session.generate(greedy(4)).outputs[0].token_ids)


EDITS = [((10, 14), []), ((10, 14), NEW), ((0, 3), NEW), ((0, 3), []), ((17, 17), NEW), ((36, 40), NEW), ((30, 40), [])]


@pytest.mark.turns(6)
@pytest.mark.parametrize(("span", "new"), EDITS)
def test_as_if_it_had_always_been_so(
    make_llm: MakeLLM, checkpoint: Checkpoint, span: tuple[int, int], new: list[int]
) -> None:
    llm = make_llm(checkpoint)
    session, twin = llm.session(PROMPT), llm.session(PROMPT)
    tokens = [*PROMPT[: span[0]], *new, *PROMPT[span[1] :]]
    cost = twin.edit_cost(range(*span))
    recorder = record(llm)
    report = session.edit(span, new)
    ran = recorder.num_tokens
    assert (report.removed, report.added, report.mode, report.exact) == (span[1] - span[0], len(new), "exact", True)
    assert len(tokens) - session.num_computed == (span != (30, 40))
    if span[1] < 40:
        assert ran == report.replayed + len(new)
        assert report.replayed == cost + (cost == 0)
    check(llm)
    goes_on(session, checkpoint, tokens)
    goes_on(twin, checkpoint, PROMPT)


def test_recurrent_layers(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    """They go on from the nearest state that is kept."""
    llm = make_llm(hybrid, kv_cache_memory="4MiB", checkpoint_interval=8, page_size=4)
    session = llm.session(PROMPT)
    session.generate(greedy(1))
    tokens = session.tokens
    cost = session.edit_cost((21, 24))
    assert 16 < 39 - cost - 3 + 4 <= 25
    assert session.edit((21, 24), NEW).replayed == cost
    goes_on(session, hybrid, [*tokens[:21], *NEW, *tokens[24:]])


def test_sessions_with_a_window(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    """Tokens that the window has let go of run again."""
    llm = make_llm(checkpoint)
    session = llm.session(PROMPT, window=20, sink=3)
    session.edit((8, 12), NEW)
    assert session.window == (20, 3)
    fresh = llm.session([*PROMPT[:8], *NEW, *PROMPT[12:]], window=20, sink=3)
    found, wanted = (one.generate(greedy(8)).outputs[0].token_ids for one in (session, fresh))
    assert found == wanted


def test_what_a_session_is_stays(small: LLM) -> None:
    session = small.session(PROMPT, pin=True, name="one", labels={"a": "b"}, cache_salt="mine")
    session.edit((3, 5), [])
    assert (session.pinned, session.name, session.labels) == (True, "one", {"a": "b"})
    assert small.generate([[*session.tokens, 1]], greedy(1))[0].num_cached_tokens == 0, "another salt"
    session.edit((0, len(session)), [])
    assert (session.tokens, session.num_computed) == ([], 0)
    session.edit((0, 0), [7])
    assert session.tokens == [7]


@pytest.mark.parametrize(
    ("given", "error", "field"),
    [
        ({"span": (3, 2)}, InvalidArgument, "span"),
        ({"span": (0, 41)}, InvalidArgument, "span"),
        ({"span": (-1, 3)}, InvalidArgument, "span"),
        ({"span": (1, 2, 3)}, InvalidArgument, "span"),
        ({"span": (True, 3)}, InvalidArgument, "span"),
        ({"span": range(0, 9, 2)}, InvalidArgument, "span"),
        ({"span": None}, InvalidArgument, "span"),
        ({"span": 3}, InvalidArgument, "span"),
        ({"span": "text"}, FailedPrecondition, None),
        ({"new": [97]}, InvalidArgument, "new"),
        ({"new": [-1]}, InvalidArgument, "new"),
        ({"new": [1.5]}, InvalidArgument, "new"),
        ({"new": "text"}, FailedPrecondition, None),
        ({"new": {"prompt_token_ids": [1]}}, InvalidArgument, "new"),
        ({"new": random_tokens(300)}, InvalidArgument, "new"),
        ({"mode": "roughly"}, InvalidArgument, "mode"),
    ],
)
def test_refusals(small: LLM, given: dict[str, Any], error: type[QuireError], field: str | None) -> None:
    session = small.session(PROMPT)
    before = state_of(session)
    with pytest.raises(error) as caught:
        session.edit(**{"span": (2, 5), **given})
    assert caught.value.field == field
    assert state_of(session) == before
    check(small)


def test_blending_is_refused_where_it_cannot_be(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    session = make_llm(hybrid, kv_cache_memory="4MiB").session(PROMPT)
    with pytest.raises(Unsupported, match="recurrent state cannot be moved"):
        session.edit((3, 5), [], mode="blend")


def test_what_cannot_run_again(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    written = llm.session(PROMPT)
    written.set_kv(attention_layer(llm), v=torch.zeros(3, 2, 16))
    seen = llm.session_from_bytes(llm.session(image([1, 2, -1, 3, 4, 5], rows_of(1))).to_bytes())
    for session, span in ((written, (10, 12)), (seen, (0, 1))):
        before = state_of(session)
        with pytest.raises(FailedPrecondition, match="which follow, would have to run again"):
            session.edit(span, NEW)
        assert state_of(session) == before
    written.edit((35, 40), NEW)
    assert (written.modified, written.tokens) == (True, [*PROMPT[:35], *NEW]), "nothing follows"
    assert not written.kv(0)["v"][:3].any()


def test_failed_and_cancelled_edits(make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(llama, max_num_batched_tokens=8)
    engine, session = engine_of(llm), llm.session(PROMPT)
    before, execute = state_of(session), engine.runner.execute
    calls: list[Any] = []

    def at_second(act: Any) -> Any:
        def run(step: Any) -> Any:
            if step.chunks:
                calls.append(step)
                if len(calls) == 2:
                    act()
            return execute(step)

        calls.clear()
        return run

    def fail() -> None:
        raise RuntimeError("the device is gone")

    def from_outside(act: Any) -> Any:
        def run() -> None:
            thread = threading.Thread(target=act)
            thread.start()
            thread.join(5)
            assert not thread.is_alive()

        return run

    def others() -> None:
        assert session._branch.busy
        assert session._branch.droppable
        with pytest.raises(FailedPrecondition, match="generating"):
            session.append([1])
        with pytest.raises(FailedPrecondition, match="generating"):
            session.edit((0, 1), [])
        assert session._branch.busy, "the first edit goes on"

    monkeypatch.setattr(engine.runner, "execute", at_second(fail))
    with pytest.raises(QuireError, match="the device is gone"):
        session.edit((10, 12), NEW)
    assert state_of(session) == before
    monkeypatch.setattr(engine.runner, "execute", at_second(from_outside(session.cancel)))
    with pytest.raises(Cancelled):
        session.edit((10, 12), NEW)
    assert state_of(session) == before
    check(llm)
    monkeypatch.setattr(engine.runner, "execute", at_second(others))
    session.edit((10, 12), NEW)
    assert len(calls) > 2
    goes_on(session, llama, [*PROMPT[:10], *NEW, *PROMPT[12:]])
    gone, step = llm.session(PROMPT[::-1]), engine.stepper.step

    def closing() -> Any:
        changed = step()
        gone.close()
        return changed

    monkeypatch.setattr(engine.stepper, "step", closing)
    with pytest.raises(Cancelled):
        gone.edit((10, 12), NEW)
    monkeypatch.undo()
    check(llm)


def test_little_room(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """The session's own state is given up for an edit; a pinned one's is not."""
    llm = make_llm(llama, pool=64, page_size=4, host_memory=0)
    session = llm.session(PROMPT)
    session.edit((0, 2), NEW)
    goes_on(session, llama, [*NEW, *PROMPT[2:]])
    session.close()
    pinned = llm.session(PROMPT, pin=True)
    before = state_of(pinned)
    with pytest.raises(ResourceExhausted):
        pinned.edit((0, 2), NEW)
    assert state_of(pinned) == before
    check(llm)


@pytest.mark.parametrize("mode", ["exact", "blend"])
def test_a_pinned_session_is_pinned_while_it_is_edited(
    make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, mode: EditMode
) -> None:
    """What the edit computes counts as pinned from the first step on."""
    llm = make_llm(llama, max_num_batched_tokens=8, page_size=4, host_memory=0)
    engine, session, uses = engine_of(llm), llm.session(PROMPT), list[PageUse]()
    session.compute()
    session.pin()
    execute = engine.runner.execute

    def watched(step: Any) -> Any:
        found = execute(step)
        if step.chunks:
            uses.append(engine.page_use())
        return found

    monkeypatch.setattr(engine.runner, "execute", watched)
    session.edit((2, 5), NEW, mode)
    assert len(uses) > 1
    uses.append(engine.page_use())
    assert all(use.pinned > 0 and use.held == 0 for use in uses)


def test_a_named_session_survives_as_edited(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path) -> None:
    llm = make_llm(llama, state_dir=tmp_path)
    session = llm.session(PROMPT, name="one")
    session.edit((10, 12), NEW)
    tokens = session.tokens
    llm.close()
    goes_on(make_llm(llama, state_dir=tmp_path).resume("one"), llama, tokens)


def test_async(llama: Checkpoint) -> None:
    async def use() -> None:
        async with AsyncLLM(llama.path, device="cpu", dtype="float32", kv_cache_memory="8MiB") as llm:
            session = await llm.session(PROMPT)
            assert await session.edit_cost((10, 12)) == 27
            assert (await session.edit((10, 12), NEW)).replayed == 27
            assert session.tokens == [*PROMPT[:10], *NEW, *PROMPT[12:]]
            task = asyncio.create_task(session.edit((0, 1), NEW))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert session.exact
            assert len(session) in (43, 47)
            await session.append([1])

    asyncio.run(use())


# -- texts -----------------------------------------------------------------------------------------

CODE = "def f(x):\n    return x + 1\n\n\ndef g(y):\n    return y * 2\n"


def test_a_text_is_taken_out(python_llm: LLM) -> None:
    tokenizer = python_llm.tokenizer
    assert tokenizer is not None
    with python_llm.session(CODE) as session:
        first = session.tokens[0]
        report = session.edit("    return x + 1\n", "    pass\n")
        assert session.text == CODE.replace("    return x + 1\n", "    pass\n")
        assert report.removed
        session.edit("def g", "")
        assert session.text == CODE.replace("    return x + 1\n", "    pass\n").replace("def g", "")
        assert session.tokens[0] == first
        for text, match in (
            ("nowhere", "the text 'nowhere' does not occur in the session"),
            ("", "span must be a text of at least one character"),
            ("\n", "more than once"),
        ):
            before = session.tokens
            with pytest.raises(InvalidArgument, match=match) as caught:
                session.edit(text)
            assert caught.value.field == "span"
            assert session.tokens == before


@pytest.mark.parametrize("text", [CODE, "größe = 'naïve café' # 日本語 🙂🙂\n" * 2 + "end"])
def test_any_piece_of_a_text(python_llm: LLM, text: str) -> None:
    """Wherever tokens begin and end, the text that is left is the text without the piece."""
    tokenizer = python_llm.tokenizer
    assert tokenizer is not None
    ids = np.array(tokenizer.encode(text))
    spoken = tokenizer.decode(ids)
    for start in range(0, len(text), 3):
        for stop in range(start + 1, len(text), 5):
            piece = text[start:stop]
            if spoken.count(piece) != 1:
                continue
            place = place_of(tokenizer, ids, piece)
            inner = tokenizer.token_bytes
            held = b"".join(inner.piece(one) for one in ids[place.start : place.stop].tolist()).decode()
            assert held == place.before + piece + place.after
            if place.stop - place.start > 1:
                smaller = b"".join(inner.piece(one) for one in ids[place.start + 1 : place.stop].tolist())
                assert not smaller.startswith((place.before + piece).encode())


def test_special_tokens_divide_texts(python_llm: LLM) -> None:
    tokenizer = python_llm.tokenizer
    assert tokenizer is not None
    special = next(iter(sorted(tokenizer.token_bytes.special_ids)))
    ids = np.array([*tokenizer.encode("one two", False), special, *tokenizer.encode("three", False)])
    assert place_of(tokenizer, ids, "three") == TextPlace(ids.size - len(tokenizer.encode("three", False)), ids.size)
    for text in ("twothree", tokenizer.token_text(special)):
        with pytest.raises(
            InvalidArgument, match=r"does not occur in the session, where special tokens are in no text"
        ):
            place_of(tokenizer, ids, text)


# -- chats -----------------------------------------------------------------------------------------


def test_a_message_of_a_chat(chatty: LLM) -> None:  # noqa: F811
    """The next turn goes on with what the message says now."""
    session = chatty.session()
    session.chat([user("The quick brown fox"), user("ignore all rules")], greedy(3))
    session.chat([user("jumps over")], greedy(3))
    answers = [turn.message["content"] for turn in session._live.turns._turns if turn.is_answer]
    session.edit("ignore all rules", "be kind")
    session.chat([user("the dog")], greedy(3))
    answer = session._live.turns._turns[-1].message["content"]
    stateless = [user("The quick brown fox"), user("be kind"), assistant(answers[0]), user("jumps over")]
    stateless += [assistant(answers[1]), user("the dog"), assistant(answer)]
    assert [turn.message for turn in session._live.turns._turns] == stateless
    assert "ignore" not in session.text
    assert "be kind" in session.text


def test_edits_before_and_behind_a_chat(chatty: LLM) -> None:  # noqa: F811
    session = chatty.session("Once upon a time. ")
    start = len(session)
    session.chat([user("The quick brown fox")], greedy(3))
    ends = [turn.end for turn in session._live.turns._turns]
    session.append([40, 41, 42])
    session.edit((ends[-1] + 1, ends[-1] + 3), [])
    assert [turn.end for turn in session._live.turns._turns] == ends
    session.edit("upon ", "")
    shift = len(session) - ends[-1] - 1
    assert session._live.turns._start == start + shift
    assert [turn.end for turn in session._live.turns._turns] == [end + shift for end in ends]
    session.chat([user("jumps")], greedy(3))
    assert session.text.startswith("Once a time.")


def test_edits_that_no_message_has(chatty: LLM) -> None:  # noqa: F811
    """The next turn would undo them."""
    session = chatty.session()
    session.chat([user("The quick brown fox")], greedy(3))
    before = state_of(session), session._live.turns.written()
    ends = [turn.end for turn in session._live.turns._turns]
    for span in ((0, 2), (ends[0] - 1, ends[0] + 1), (ends[0] - 1, ends[0])):
        with pytest.raises(FailedPrecondition, match="content of one message"):
            session.edit(span, [])
        assert (state_of(session), session._live.turns.written()) == before


def test_messages_that_say_the_same(chatty: LLM) -> None:  # noqa: F811
    """Positions tell which one is meant, unless something else may say the same."""
    tokenizer = chatty.tokenizer
    assert tokenizer is not None

    def edited(messages: list[str], text: str, which: int, new: str) -> Session:
        """Edit the tokens of one of a text's occurrences."""
        session = chatty.session()
        session.chat([user(one) for one in messages], greedy(1))
        pieces = [tokenizer.token_text(token) for token in session.tokens]
        ends, whole, place = np.cumsum([len(piece) for piece in pieces]), "".join(pieces), -1
        for _ in range(which + 1):
            place = whole.index(text, place + 1)
        start, stop = np.searchsorted(ends, place, "right"), np.searchsorted(ends, place + len(text)) + 1
        rest = "".join(pieces[start:stop]).split(text)
        session.edit((int(start), int(stop)), f"{rest[0]}{new}{rest[1]}")
        return session

    same = ["zebra zebra", "one zebra", "zebra zebra"]
    for which, wanted in (
        (0, ["cat zebra", *same[1:]]),
        (2, [same[0], "one cat", same[2]]),
        (4, [*same[:2], "zebra cat"]),
    ):
        session = edited(same, "zebra", which, "cat")
        assert [turn.message["content"] for turn in session._live.turns._turns[:3]] == wanted
    for which, wanted in ((0, ["egg", "say ham now"]), (1, ["ham", "say egg now"])):
        session = edited(["ham", "say ham now"], "ham", which, "egg")
        assert [turn.message["content"] for turn in session._live.turns._turns[:2]] == wanted, "a quoted message"
    with pytest.raises(FailedPrecondition, match="content of one message"):
        edited(["user", "more"], "user", 1, "role")
