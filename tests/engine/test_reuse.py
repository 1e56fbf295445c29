"""``RequestOutput.reuse``: what was reused of a prompt, from where, and why it was not more."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.test_named_adapters import directories
from tests.branches.test_stored_state import force, squeeze
from tests.sessions.test_session_chat import folder, user
from tests.small_llms import Checkpoint, MakeLLM, check, engine_of, greedy, make_checkpoint, random_tokens, record

from quire import LLM, Reuse
from quire.base.outputs import MISSES, TIERS, Miss, RequestOutput
from quire.base.token_history import TokenHistory
from quire.engine.miss_search import KEYS, QUOTED
from quire.engine.request import Request, ReuseNote
from quire.engine.request_outputs import reuse_of

from .made_requests import made_request

__all__ = ["directories", "folder"]

PROMPT = random_tokens(60)
OTHER = random_tokens(60, seed=1)
PARTED = [*PROMPT[:40], *OTHER[:20]]
SUFFIX = [7, 8, 9]


def agrees(output: RequestOutput) -> Reuse:
    """The output's reuse, which says the same as its older fields."""
    reuse = output.reuse
    assert (reuse.cached, reuse.replayed) == (output.num_cached_tokens, output.num_replayed_tokens)
    assert sum(reuse.by_tier.values()) == reuse.cached
    assert all(reuse.by_tier.values()), "tiers without tokens are left out"
    assert set(reuse.by_tier) <= set(TIERS)
    assert bool(output.cache_note) == bool(reuse.replayed)
    if reuse.missed_at is not None:
        assert reuse.missed_at >= reuse.cached
    return reuse


def ask(llm: LLM, prompt: list[int], **options: Any) -> Reuse:
    """Generate two tokens; what ran must be what was not reused."""
    recorder = record(llm)
    output = llm.generate(prompt, greedy(2), **options)[0]
    reuse = agrees(output)
    assert recorder.num_tokens == len(prompt) - reuse.cached + 1
    return reuse


def miss_of(reuse: Reuse) -> tuple[Miss, int | None, int]:
    return reuse.miss, reuse.missed_at, reuse.cached


# -- each reason -----------------------------------------------------------------------------------


def test_nothing_longer_was_known(small: LLM) -> None:
    assert ask(small, PROMPT) == Reuse()
    assert ask(small, PROMPT) == Reuse(cached=59, by_tier={"pool": 59})
    found = ask(small, [*PROMPT, *small.generate(PROMPT, greedy(2))[0].outputs[0].token_ids, *SUFFIX])
    assert found == Reuse(cached=61, by_tier={"pool": 61})
    assert found.reason == "tokens 0..60 are reused; nothing that was kept begins with more of this prompt"
    assert ask(small, OTHER).reason.startswith("no token is reused; ")


def test_another_text(small: LLM) -> None:
    ask(small, PROMPT)
    found = ask(small, PARTED)
    assert miss_of(found) == (Miss.OTHER_TEXT, 40, 40)
    assert found.reason == (
        "tokens 0..39 are reused; token 40 differs from a text that was computed before "
        f"({OTHER[:QUOTED]} here, {PROMPT[40 : 40 + QUOTED]} there)"
    )
    # Its last token runs anyway, so no state was missed.
    assert miss_of(ask(small, [*PROMPT[:40], 96 - PROMPT[40]])) == (Miss.NONE, None, 40)


def test_few_common_tokens(small: LLM) -> None:
    """Another text is named where it parts, however early; of a short prompt nothing is said, and
    nothing of few tokens under another salt."""
    ask(small, PROMPT)
    assert miss_of(ask(small, [*PROMPT[:31], *OTHER[:20]])) == (Miss.OTHER_TEXT, 31, 31)
    assert miss_of(ask(small, [*PROMPT[:32], *OTHER[20:40]])) == (Miss.OTHER_TEXT, 32, 32)
    assert miss_of(ask(small, [*PROMPT[:1], *OTHER[1:40]])) == (Miss.OTHER_TEXT, 1, 1)
    assert miss_of(ask(small, [*PROMPT[:10], *OTHER[:20]])) == (Miss.NONE, None, 10)
    assert miss_of(ask(small, PROMPT[:31], cache_salt="x")) == (Miss.NONE, None, 0)


def test_another_salt_and_another_adapter(make_llm: MakeLLM, llama: Checkpoint, directories: dict[str, Path]) -> None:
    llm = make_llm(llama)
    llm.load_adapter("it", directories["one"])
    ask(llm, PROMPT, cache_salt="x")
    found = ask(llm, [*PROMPT[:50], *OTHER], cache_salt="y")
    assert miss_of(found) == (Miss.OTHER_SALT, 50, 0)
    assert "under another cache_salt" in found.reason
    found = ask(llm, [*PROMPT[:45], *OTHER], cache_salt="x", adapter="it")
    assert miss_of(found) == (Miss.OTHER_ADAPTER, 45, 0)
    # Its own salt comes before another one in which no more is known.
    assert miss_of(ask(llm, [*PROMPT[:50], *SUFFIX], cache_salt="x")) == (Miss.OTHER_TEXT, 50, 50)
    # More is known under another adapter than under its own.
    ask(llm, OTHER[:40], adapter="it")
    ask(llm, OTHER)
    assert miss_of(ask(llm, [*OTHER, *SUFFIX], adapter="it")) == (Miss.OTHER_ADAPTER, 60, 40)
    llm.unload_adapter("it")
    # Its state is gone; that it was there is still known.
    assert miss_of(ask(llm, [*PROMPT[:45], *OTHER, 3], cache_salt="x")) == (Miss.OTHER_ADAPTER, 105, 45)
    check(llm)


def test_salts_that_were_used_long_ago_are_not_looked_through(small: LLM) -> None:
    ask(small, PROMPT, cache_salt="first")
    for number in range(KEYS - 1):
        ask(small, SUFFIX, cache_salt=str(number))
    ask(small, SUFFIX, cache_salt="first")
    assert ask(small, PROMPT, cache_salt="new").miss is Miss.OTHER_SALT
    engine_of(small).reset_prefix_cache()
    ask(small, PROMPT, cache_salt="first")
    for number in range(KEYS):
        ask(small, SUFFIX, cache_salt=str(number))
    assert ask(small, PROMPT, cache_salt="newer").miss is Miss.NONE


def test_evicted(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    llm = make_llm(checkpoint, host_memory=0)
    ask(llm, PROMPT)
    squeeze(llm)
    found = ask(llm, [*PROMPT[:50], *OTHER])
    assert miss_of(found) == (Miss.EVICTED, 50, 0)
    assert found.reason == "no token is reused; the state of the first 50 tokens was there and has been given up"
    metrics = llm.metrics()
    assert metrics['quire:reuse_misses_total{reason="evicted"}'] == metrics["quire:reuse_misses_total"] == 1
    # What is computed again is no longer missed.
    squeeze(llm)
    ask(llm, PROMPT)
    assert ask(llm, PROMPT).miss is Miss.NONE
    assert miss_of(ask(llm, [*PROMPT, *SUFFIX])) == (Miss.OTHER_TEXT, 60, 60)
    # Whoever asks for all to be forgotten is not reminded.
    llm.reset_prefix_cache()
    assert ask(llm, PROMPT) == Reuse()


def test_a_tight_pool_gives_up_what_is_asked_for_again(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=128, page_size=4)
    texts = [random_tokens(50, seed=seed) for seed in range(4)]
    seen = [ask(llm, texts[turn % 4]).miss for turn in range(8)]
    assert seen == [Miss.NONE] * 4 + [Miss.EVICTED] * 4
    check(llm)


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_windows_have_let_go(make_llm: MakeLLM, checkpoints: dict[str, Checkpoint], family: str) -> None:
    llm = make_llm(checkpoints[family], page_size=4, max_num_batched_tokens=16)
    long = random_tokens(120)
    ask(llm, long)
    found = ask(llm, [*long[:50], *OTHER])
    assert found.miss is Miss.WINDOW
    assert found.missed_at == found.cached + found.replayed == 50 > found.cached
    assert "windows have let go of what a continuation at 50 needs" in found.reason


def test_no_checkpoint(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB", checkpoint_interval=16)
    ask(llm, PROMPT)
    found = ask(llm, [*PROMPT[:50], *OTHER])
    assert (miss_of(found), found.replayed) == ((Miss.NO_CHECKPOINT, 50, 48), 2)
    # There a state was kept then: now nothing but the text differs.
    found = ask(llm, [*PROMPT[:50], *SUFFIX])
    assert (miss_of(found), found.replayed) == ((Miss.OTHER_TEXT, 50, 50), 0)


@pytest.mark.parametrize("reason", [Miss.TOO_EXPENSIVE, Miss.DAMAGED, Miss.UNREACHABLE])
def test_what_a_store_says(small: LLM, monkeypatch: pytest.MonkeyPatch, reason: Miss) -> None:
    """It is noted while a request is attached, and is kept unless more was missed."""
    scheduler = engine_of(small).scheduler
    attach = scheduler._attach
    length: int | None = 55

    def attach_and_note(request: Request) -> None:
        attach(request)
        request.seat.reuse.miss(reason, length)

    ask(small, PROMPT)
    squeeze(small)
    monkeypatch.setattr(scheduler, "_attach", attach_and_note)
    assert miss_of(ask(small, PROMPT)) == (Miss.EVICTED, 59, 0)
    assert miss_of(ask(small, [*PROMPT[:55], *OTHER[:2]])) == (reason, 55, 55)
    length = None
    assert miss_of(ask(small, [*PROMPT, *SUFFIX])) == (reason, None, 60)
    assert small.metrics()[f'quire:reuse_misses_total{{reason="{reason}"}}'] == 2


def test_each_reason_has_a_sentence() -> None:
    assert set(MISSES) == set(Miss)
    for miss in Miss:
        reason = Reuse(cached=3, miss=miss, missed_at=1234).reason
        assert reason.startswith("tokens 0..2 are reused; ")
        assert ("1234" in reason) == ("{at}" in MISSES[miss])
        assert Reuse(miss=miss).as_dict()["miss"] == miss.value


def test_the_longest_match_is_the_one_that_was_missed() -> None:
    note = ReuseNote()
    note.miss(Miss.EVICTED, 40)
    note.miss(Miss.OTHER_TEXT, 40)
    assert (note.missed, note.missed_at) == (Miss.EVICTED, 40)
    note.miss(Miss.OTHER_SALT, 41)
    assert (note.missed, note.missed_at) == (Miss.OTHER_SALT, 41)
    note.miss(Miss.UNREACHABLE, None)
    note.miss(Miss.EVICTED, 50)
    assert (note.missed, note.missed_at) == (Miss.UNREACHABLE, None)


# -- what runs -------------------------------------------------------------------------------------


@pytest.mark.turns(2)
@pytest.mark.parametrize("seed", range(4))
def test_random_prompts(make_llm: MakeLLM, llama: Checkpoint, seed: int) -> None:
    """Against all prompts so far, compared one by one; now and then all state is given up."""
    llm, rng = make_llm(llama), random.Random(seed)
    texts = [random_tokens(90, seed=number) for number in range(2)]
    held: list[tuple[str | None, list[int]]] = []
    before: list[tuple[str | None, list[int]]] = []
    seen = set()
    for _ in range(40):
        if rng.random() < 0.15:
            squeeze(llm)
            held.clear()
        prompt = [*rng.choice(texts)[: rng.randint(0, 90)], *random_tokens(rng.randint(1, 9), seed=rng.randint(0, 3))]
        salt = rng.choice([None, "a", "b"])
        wanted = expected(prompt, salt, held, before)
        assert miss_of(ask(llm, prompt, cache_salt=salt)) == wanted
        seen.add(wanted[0])
        # Of the answer of two tokens, the first was run.
        for known in (held, before):
            known.append((salt, [*prompt, *llama.greedy(prompt, 1)]))
    assert seen == {Miss.NONE, Miss.OTHER_TEXT, Miss.OTHER_SALT, Miss.EVICTED}
    check(llm)


def expected(
    prompt: list[int],
    salt: str | None,
    held: list[tuple[str | None, list[int]]],
    before: list[tuple[str | None, list[int]]],
) -> tuple[Miss, int | None, int]:
    """What was missed, where, and what was reused."""
    limit = len(prompt) - 1

    def common(text: list[int]) -> int:
        return next(
            (at for at, (a, b) in enumerate(zip(prompt[:limit], text, strict=False)) if a != b), min(len(text), limit)
        )

    cached = max((common(text) for name, text in held if name == salt), default=0)
    mine = [text for name, text in before if name == salt]
    own = max(map(common, mine), default=0)
    other = max((common(text) for name, text in before if name != salt), default=0)
    parts = any(common(text) == own and len(text) > own for text in mine)
    if cached == limit or limit < 32:
        return Miss.NONE, None, cached
    if other > own and other >= 32:
        return Miss.OTHER_SALT, other, cached
    if own > cached and own >= 32:
        return Miss.EVICTED, own, cached
    if parts and (own >= 32 or own == cached > 0):
        return Miss.OTHER_TEXT, own, cached
    return Miss.NONE, None, cached


def test_samples_share_the_reuse_of_their_prompt(small: LLM) -> None:
    ask(small, PROMPT)
    recorder = record(small)
    output = small.generate(PARTED, greedy(3, n=3, temperature=1.0, seed=1))[0]
    assert miss_of(agrees(output)) == (Miss.OTHER_TEXT, 40, 40)
    assert recorder.num_tokens == 20 + 3 * 2
    assert small.metrics()['quire:prompt_tokens_reused_total{tier="pool"}'] == 40


def test_prompt_logprobs_reuse_nothing_and_miss_nothing(small: LLM) -> None:
    ask(small, PROMPT)
    assert agrees(small.generate(PARTED, greedy(2, prompt_logprobs=1))[0]) == Reuse()


def test_without_a_prefix_cache_nothing_is_known(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, enable_prefix_caching=False)
    assert ask(llm, PROMPT) == ask(llm, PROMPT) == Reuse()


def test_a_preempted_request_says_what_its_first_admission_found(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=160, page_size=4, max_num_batched_tokens=32)
    begin = random_tokens(36, seed=3)
    llm.generate(begin, greedy(1))
    prompts = [[*begin, *random_tokens(6, seed=seed)] for seed in range(3)]
    outputs = llm.generate(prompts, greedy(60))
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for output in outputs:
        assert agrees(output).cached == 36
        assert output.reuse.miss in (Miss.NONE, Miss.OTHER_TEXT)
        assert output.reuse.missed_at in (None, 36)


# -- sessions --------------------------------------------------------------------------------------


def test_sessions(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    llm = make_llm(checkpoint)
    session = llm.session(PROMPT)
    assert agrees(session.generate(greedy(4))) == Reuse(cached=59, by_tier={"pool": 59})
    session.append(SUFFIX)
    assert agrees(session.generate(greedy(4))) == Reuse(cached=66, by_tier={"pool": 66})
    branch = session.fork(at=50)
    branch.append(OTHER)
    recorder = record(llm)
    found = agrees(branch.generate(greedy(1)))
    assert recorder.num_tokens == 110 - found.cached
    # A branch means to go another way.
    assert found.miss in (Miss.NONE, Miss.WINDOW)
    session.close()
    branch.close()
    assert ask(llm, [*PROMPT, *SUFFIX]).missed_at in (None, 60, 62)


def test_an_idle_session_comes_back_from_host_memory(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    llm = make_llm(checkpoint)
    force(llm)
    session = llm.session(PROMPT)
    session.generate(greedy(4))
    squeeze(llm)
    assert agrees(session.generate(greedy(1))) == Reuse(cached=63, by_tier={"memory": 63})
    assert llm.metrics()['quire:prompt_tokens_reused_total{tier="memory"}'] == 63
    force(llm, 0)
    squeeze(llm)
    found = agrees(session.generate(greedy(1)))
    assert miss_of(found) == (Miss.EVICTED, 64, 0)


def test_a_preempted_request_comes_back_without_another_word(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=96, page_size=4, max_num_batched_tokens=16)
    force(llm)
    outputs = llm.generate([random_tokens(length) for length in (20, 11, 17, 5)], greedy(40))
    assert llm.metrics()["quire:store_tokens_loaded_total"] > 0
    assert [agrees(output) for output in outputs] == [Reuse()] * 4


DROPS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content if loop.last or message.role == 'user' else 'short' }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_changes_old_turns(make_llm: MakeLLM, folder: Path, tmp_path: Path) -> None:
    """As those do that drop reasoning: stateless and in a session, the position and both texts are
    told."""
    make_checkpoint("llama", tmp_path, vocab_size=600, max_position_embeddings=1024)
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(DROPS)
    llm = make_llm(tmp_path)
    assert llm.tokenizer is not None
    ask_first = user("The quick brown fox jumps over the lazy dog, and over again it jumps")
    session = llm.session()
    first = session.chat([ask_first], greedy(8))
    answer = {"role": "assistant", "content": first.outputs[0].text}
    fresh = llm.chat([ask_first], greedy(8))[0]
    assert fresh.outputs[0].token_ids == first.outputs[0].token_ids
    length = len(first.prompt_token_ids)
    assert length >= 32
    # The session's state after this is not the other's.
    stateless = llm.chat([ask_first, answer, user("more")], greedy(4))[0]
    llm.reset_prefix_cache()
    for output in (stateless, session.chat([user("more")], greedy(4))):
        found = agrees(output)
        assert miss_of(found) == (Miss.OTHER_TEXT, length, length)
        here = llm.tokenizer.decode(output.prompt_token_ids[length:][:QUOTED], skip_special_tokens=False)
        there = llm.tokenizer.decode(first.outputs[0].token_ids[:QUOTED], skip_special_tokens=False)
        assert here.startswith("short"[:2])
        assert found.reason.endswith(f"({here!r} here, {there!r} there)")


def test_a_stream_of_a_session_tells_it_at_its_end(small: LLM) -> None:
    session = small.session(PROMPT)
    session.generate(greedy(1))
    with session.stream(greedy(3)) as stream:
        next(stream)
        assert stream.reuse is None
        list(stream)
        assert stream.reuse == Reuse(cached=60, by_tier={"pool": 60})


def test_images_are_not_quoted() -> None:
    request = made_request([1, 2, -900, 4])
    request.seat.reuse.miss(Miss.OTHER_TEXT, 1, TokenHistory([-800, 5, 6]).ids)
    assert reuse_of(request, None).quote == " ([2, 4] here, [5, 6] there)"
