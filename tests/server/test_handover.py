"""Two servers that share prompts: the same tokens as one server's, whatever breaks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.examples import examples
from tests.server.conftest import OPTIONS, serving
from tests.server.killable import killable

from quire import AsyncLLM, SamplingParams
from quire.base.errors import InvalidArgument
from quire.channels.greeting import Trust
from quire.channels.pair import channel_pair
from quire.kv.exchange import get_layout
from quire.server.handover import decode, prefill
from quire.server.handover.decode import DecodeSide
from quire.server.handover.prefill import PrefillSide
from quire.server.handover.prompts import AskedPrompt
from quire.server.http.serving import side_of
from quire.server.http.settings import ServerSettings

SECRET = Trust(b"sixteen bytes or more")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [list(random.Random(number).choices(range(5, 4000), k=70 + number)) for number in range(40)]


@pytest.fixture(scope="module")
def prefiller(plain_folder: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(plain_folder, **OPTIONS)
    yield llm
    asyncio.run(llm.close())


@pytest.fixture(scope="module")
def decoder(plain_folder: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(plain_folder, **{**OPTIONS, "page_size": 5})
    yield llm
    asyncio.run(llm.close())


@pytest.fixture(scope="module")
def expected(plain_folder: Path) -> dict[tuple[int, ...], list[int]]:
    """What one server answers."""
    llm = AsyncLLM(plain_folder, **{**OPTIONS, "enable_prefix_caching": False})
    found = asyncio.run(llm.generate(PROMPTS, GREEDY))
    asyncio.run(llm.close())
    return {tuple(prompt): output.outputs[0].token_ids for prompt, output in zip(PROMPTS, found, strict=True)}


@contextmanager
def joined(prefiller: AsyncLLM, decoder: AsyncLLM, url: str, trust: Trust = SECRET) -> Iterator[DecodeSide]:
    """Both sides, until the end of the block."""
    first = PrefillSide(prefiller, url, SECRET, prefiller.identity.fields())
    second = DecodeSide(decoder, first.url, trust, decoder.identity.fields())
    decoder.before_prompts = second.bring
    try:
        yield second
    finally:
        decoder.before_prompts = None
        second.close()
        first.close()
        asyncio.run(decoder.reset_prefix_cache())
        asyncio.run(prefiller.reset_prefix_cache())
        for llm in (prefiller, decoder):
            assert llm.engine.runner.state.empty(), "pages in, pages out"
            assert not llm.engine.runner.state.parts.transfers  # type: ignore[attr-defined]
    until(lambda: not [one for one in threading.enumerate() if one.name.startswith(("quire-channel", "quire-peer"))])


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def counts(llm: AsyncLLM, name: str = "prompts_handed_over") -> dict[str, float]:
    snapshot = llm.engine.snapshot()
    return {result: snapshot[f'quire:{name}_total{{result="{result}"}}'] for result in ("whole", "lost", "refused")}


def grown(llm: AsyncLLM, before: dict[str, float], name: str = "prompts_handed_over") -> dict[str, int]:
    return {result: int(count - before[result]) for result, count in counts(llm, name).items()}


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:0", "shm:{}/s"])
def test_tokens_are_those_of_one_server(
    url: str, prefiller: AsyncLLM, decoder: AsyncLLM, expected: dict[tuple[int, ...], list[int]], tmp_path: Path
) -> None:
    before, sent = counts(decoder), counts(prefiller, "prompts_sent")
    steps = decoder.engine.snapshot()["quire:tokens_handed_over_total"]
    with joined(prefiller, decoder, url.format(tmp_path)):
        found = asyncio.run(decoder.generate(PROMPTS[:6], GREEDY))
        for prompt, output in zip(PROMPTS, found, strict=False):
            assert output.outputs[0].token_ids == expected[tuple(prompt)]
            assert output.num_cached_tokens == len(prompt) - 1, "only the last token ran here"
        # A longer prompt with the same beginning: only what is missing comes.
        longer = [*PROMPTS[0], *found[0].outputs[0].token_ids, *PROMPTS[1]]
        asyncio.run(decoder.generate([longer], GREEDY))
        until(lambda: grown(prefiller, sent, "prompts_sent")["whole"] == 7)
    assert grown(decoder, before) == {"whole": 7, "lost": 0, "refused": 0}
    moved = decoder.engine.snapshot()["quire:tokens_handed_over_total"] - steps
    assert moved == sum(len(prompt) - 1 for prompt in PROMPTS[:6]) + len(longer) - 1 - len(PROMPTS[0]) - 5


def test_over_http(prefiller: AsyncLLM, decoder: AsyncLLM, expected: dict[tuple[int, ...], list[int]]) -> None:
    """OpenAI's endpoint, streamed and not."""
    with joined(prefiller, decoder, "tcp://127.0.0.1:0"), serving(decoder) as served:
        before = counts(decoder)
        body = {"prompt": PROMPTS[3], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answer = served.client.post("/v1/completions", json=body).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPTS[3]) - 1
        again = served.client.post("/v1/completions", json={**body, "prompt": PROMPTS[4], "stream": True})
        assert again.status_code == 200
        assert grown(decoder, before)["whole"] == 2
        text = asyncio.run(decoder.generate([PROMPTS[3]], GREEDY))[0].outputs[0]
        assert text.token_ids == expected[tuple(PROMPTS[3])]
        assert answer["choices"][0]["text"] == text.text
        assert "quire:prompts_handed_over_total" in served.client.get("/metrics").text


def test_sessions_and_scores_run_here(prefiller: AsyncLLM, decoder: AsyncLLM) -> None:
    before = counts(decoder)
    with joined(prefiller, decoder, "tcp://127.0.0.1:0"):
        asyncio.run(decoder.generate([PROMPTS[0]], GREEDY.replace(prompt_logprobs=1)))
        asyncio.run(decoder.generate([PROMPTS[1][:20]], GREEDY))
    assert grown(decoder, before) == {"whole": 0, "lost": 0, "refused": 0}


@pytest.mark.parametrize("reason", ["secret", "nobody", "model", "layout", "full"])
def test_refusals_are_answered_here(
    reason: str,
    prefiller: AsyncLLM,
    decoder: AsyncLLM,
    expected: dict[tuple[int, ...], list[int]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sentence in the log, one count, and the answer of one server."""
    before = counts(decoder)
    words = {
        "secret": "does not have the secret of this server",
        "nobody": "nothing listens at",
        "model": "the prompt is for the model",
        "layout": "disagg_mark_send: 7 layers found, 2 expected",
        "full": "would not fit",
    }[reason]
    trust = Trust(b"another secret") if reason == "secret" else SECRET
    with joined(prefiller, decoder, "tcp://127.0.0.1:0", trust) as side, caplog.at_level("WARNING"):
        if reason == "nobody":
            monkeypatch.setattr(side, "_url", "tcp://127.0.0.1:1")
        elif reason == "model":
            monkeypatch.setattr(side, "_model", {"weights": "others"})
        elif reason == "layout":
            first = iter([{"layers": [{}] * 7}])  # what the receiver says that it has
            monkeypatch.setattr(
                "quire.kv.transfer_verbs.get_layout", lambda state: next(first, None) or get_layout(state)
            )
        elif reason == "full":

            def full(*given: object, **more: object) -> None:
                raise InvalidArgument("it would not fit")

            monkeypatch.setattr(prefill, "send_prompt", full)
        [output] = asyncio.run(decoder.generate([PROMPTS[7]], GREEDY))
    assert output.outputs[0].token_ids == expected[tuple(PROMPTS[7])]
    assert output.num_cached_tokens == 0
    found = grown(decoder, before)
    assert found["whole"] == 0
    assert found["lost"] + found["refused"] == 1
    assert words in caplog.text


def breaking(end: Any, at: int, kind: str) -> None:
    """Let an end break at its n-th message."""
    send, count = end.send, iter(range(10**9))

    def sends(parts: Any) -> None:
        if next(count) == at:
            if kind == "closed":
                end._break("cut")
            elif kind == "damaged":
                whole = bytearray().join(parts)
                whole[-1 if len(whole) > 70 else 3] ^= 1
                parts = [whole]
        send(parts)

    end.send = sends


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_whatever_breaks_the_tokens_are_right(
    victim: str,
    prefiller: AsyncLLM,
    decoder: AsyncLLM,
    expected: dict[tuple[int, ...], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connections that are cut, and bytes that are damaged, at random messages of either side."""
    chance, before = random.Random(victim), counts(decoder)
    module = prefill if victim == "prefill" else decode
    rounds = examples(12, 120)
    if victim == "prefill":
        inbox = prefill.Inbox

        def made(channel: Any) -> Any:
            found = inbox(channel)
            breaking(channel, chance.randint(0, 6), chance.choice(["closed", "damaged", "none"]))
            return found

        monkeypatch.setattr(module, "Inbox", made)
    else:
        connect = decode.connect

        def connected(*given: Any) -> Any:
            end = connect(*given)
            breaking(end, chance.randint(0, 3), chance.choice(["closed", "damaged", "none"]))
            return end

        monkeypatch.setattr(module, "connect", connected)
    with joined(prefiller, decoder, "tcp://127.0.0.1:0") as side:
        for number in range(rounds):
            prompt = PROMPTS[number % len(PROMPTS)]
            [output] = asyncio.run(decoder.generate([prompt], GREEDY))
            assert output.outputs[0].token_ids == expected[tuple(prompt)]
            asyncio.run(decoder.reset_prefix_cache())
            side._down_until = 0.0
            while side._idle and chance.random() < 0.5:
                side._idle.pop().close()
    found = grown(decoder, before)
    assert sum(found.values()) == rounds
    assert found["whole"]
    assert found["lost"]


def test_pages_are_given_up_for_requests(
    prefiller: AsyncLLM, decoder: AsyncLLM, expected: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that never comes holds no pages that a request needs."""
    before = counts(decoder)
    monkeypatch.setattr(prefill, "send_prompt", lambda *given, **more: time.sleep(60))
    with joined(prefiller, decoder, "tcp://127.0.0.1:0") as side:
        monkeypatch.setattr(prefill._Prompt, "begin", lambda self: None)

        async def both() -> Any:
            task = asyncio.create_task(decoder.generate([PROMPTS[8]], GREEDY))
            while not side._incoming.reclaimable():
                await asyncio.sleep(0.01)
            with decoder.engine.lock:
                assert decoder.engine.runner.room.make()
            return await task

        [output] = asyncio.run(both())
        assert output.outputs[0].token_ids == expected[tuple(PROMPTS[8])]
    assert grown(decoder, before) == {"whole": 0, "lost": 0, "refused": 1}


def test_a_silent_server(
    prefiller: AsyncLLM, decoder: AsyncLLM, expected: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = counts(decoder)
    monkeypatch.setattr(decode, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(prefill._Prompt, "begin", lambda self: None)
    with joined(prefiller, decoder, "tcp://127.0.0.1:0"):
        [output] = asyncio.run(decoder.generate([PROMPTS[9]], GREEDY))
        assert output.outputs[0].token_ids == expected[tuple(PROMPTS[9])]
    assert grown(decoder, before) == {"whole": 0, "lost": 1, "refused": 0}


SLOW_STEPS = {**OPTIONS, "max_num_seqs": 4, "max_num_batched_tokens": 8}
"""A prompt takes a dozen steps."""


def test_a_prefill_server_that_is_killed(
    plain_folder: Path, decoder: AsyncLLM, expected: dict[tuple[int, ...], list[int]], tmp_path: Path
) -> None:
    """``kill -9`` at random moments: every answer is right, and all pages come back."""
    chance, secret, url = random.Random(1), tmp_path / "secret", f"shm:{tmp_path}/s"
    secret.write_bytes(SECRET.secret)
    for number in range(examples(1, 40)):
        given = {"role": "prefill", "peer": url, "secret_file": str(secret)}
        with killable(plain_folder, tmp_path / "state", options=SLOW_STEPS, **given) as found:
            side = DecodeSide(decoder, url, SECRET, decoder.identity.fields())
            decoder.before_prompts = side.bring
            killer = threading.Timer(chance.uniform(0.01, 0.3), found.kill)
            killer.start()
            prompts = chance.sample(PROMPTS, 4)
            for prompt, output in zip(prompts, asyncio.run(decoder.generate(prompts, GREEDY)), strict=True):
                assert output.outputs[0].token_ids == expected[tuple(prompt)], number
            killer.join()
            decoder.before_prompts = None
            side.close()
        asyncio.run(decoder.reset_prefix_cache())
        assert decoder.engine.runner.state.empty()


def test_a_prompt_that_starts_after_its_receiver_is_gone(prefiller: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of its two jobs runs anything: nobody would end the hand-over."""

    def sent(*_: Any, **__: Any) -> None:
        raise AssertionError("its prompt was sent")

    monkeypatch.setattr(prefill, "send_prompt", sent)
    side = PrefillSide(prefiller, "tcp://127.0.0.1:0", SECRET, prefiller.identity.fields())
    asked = AskedPrompt(tokens=np.arange(9), key=("", None), adapter=None, begin=4, map=(), model=side.model)
    prompt = prefill._Prompt(side, asked, prefill.Inbox(channel_pair()[0]), "of a test")
    prompt.end()
    prompt.begin()
    until(lambda: prompt.job.over)
    assert prompt.job.requests == []
    assert prompt.job.error is None
    assert prompt._send() == []
    side.close()


def test_a_decode_server_that_is_killed(plain_folder: Path, prefiller: AsyncLLM, tmp_path: Path) -> None:
    """The other side of it: the prefill server forgets its prompts, and serves the next one."""
    chance, secret = random.Random(2), tmp_path / "secret"
    secret.write_bytes(SECRET.secret)
    side = PrefillSide(prefiller, "tcp://127.0.0.1:0", SECRET, prefiller.identity.fields())
    for _ in range(examples(1, 40)):
        given = {"role": "decode", "peer": side.url, "secret_file": str(secret)}
        with killable(plain_folder, tmp_path / "state", options=OPTIONS, **given) as found:
            before = counts(prefiller, "prompts_sent")["whole"]
            body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
            assert found.client.post("/v1/completions", json={**body, "prompt": PROMPTS[0]}).status_code == 200
            until(lambda: counts(prefiller, "prompts_sent")["whole"] > before)  # noqa: B023
            killer = threading.Timer(chance.uniform(0.0, 0.05), found.kill)
            killer.start()
            with contextlib.suppress(httpx.HTTPError):
                found.client.post("/v1/completions", json={**body, "prompt": PROMPTS[1:9]})
            killer.join()
        until(lambda: not prefiller.engine.has_work and not prefiller.engine.runner.state.parts.transfers)  # type: ignore[attr-defined]
    side.close()
    asyncio.run(prefiller.reset_prefix_cache())
    assert prefiller.engine.runner.state.empty()


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"role": "draft"}, "role", "prefill, decode, both"),
        ({"role": "decode"}, "peer", "--peer is missing"),
        ({"peer": "tcp://127.0.0.1:1"}, "peer", "it has no --peer"),
        ({"role": "decode", "peer": "http://a:1"}, "peer", "tcp://HOST:PORT"),
        ({"role": "decode", "peer": "tcp://a:1", "secret_file": "/nowhere"}, "secret_file", "cannot be read"),
    ],
)
def test_bad_settings(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as raised:
        ServerSettings(**given)
    assert raised.value.field == field


def test_secrets(tmp_path: Path, decoder: AsyncLLM) -> None:
    secret = tmp_path / "secret"
    secret.write_text(" short \n")
    with pytest.raises(InvalidArgument, match="has 5 bytes; at least 16 are needed"):
        ServerSettings(role="decode", peer="tcp://127.0.0.1:1", secret_file=str(secret))
    with pytest.raises(InvalidArgument, match="off this machine, so who hands over must prove a secret"):
        side_of(decoder, ServerSettings(role="decode", peer="tcp://192.0.2.1:9"))
    assert side_of(decoder, ServerSettings()) is None
