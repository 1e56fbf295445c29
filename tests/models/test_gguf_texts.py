"""Arrays of texts in GGUF files, many at a time, against one by one."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest

from quire.weights import gguf_texts
from quire.weights.gguf_texts import _ends_one_by_one, split_texts, text_bounds

MOST = 1000
PIECES = ("a", "def", "▁", "é", "👍", "\n", " ", "\0", "\0" * 9, "\x01" + "\0" * 7, "x" * 255, "x" * 256, "x" * 700)


def array(texts: list[str]) -> bytes:
    return b"".join(struct.pack("<Q", len(one.encode())) + one.encode() for one in texts)


def texts(generator: random.Random, plain: float) -> list[str]:
    """Texts, of which a part has a usual length and no zeros."""
    found = []
    for _ in range(generator.randrange(1, 60)):
        pieces = PIECES[:7] if generator.random() < plain else PIECES
        found.append("".join(generator.choice(pieces) for _ in range(generator.randrange(0 if plain < 1 else 1, 4))))
    return [one for one in found if len(one.encode()) <= MOST]


@pytest.mark.parametrize("plain", [0.0, 0.5, 0.95, 1.0])
def test_bounds_and_texts_are_those_of_one_after_the_other(plain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(plain)
    for turn in range(200):
        monkeypatch.setattr(gguf_texts, "WINDOW", generator.choice((300, 2000, 1 << 20)))
        monkeypatch.setattr(gguf_texts, "FEW", generator.choice((1, 3, 1024)))
        wanted = texts(generator, plain)
        before, content = generator.randbytes(3), array(wanted)
        data = np.frombuffer(before + content + generator.choice((b"", b"\x05", bytes(40), content)), np.uint8)
        if turn % 4 == 3:
            data = data[: generator.randrange(len(before), len(data))]
        bounds = text_bounds(data, len(before), len(wanted), MOST)
        assert bounds[0] == len(before)
        assert bounds[1:].tolist() == _ends_one_by_one(data, len(before), len(wanted), MOST).tolist()
        if len(bounds) == len(wanted) + 1:
            assert split_texts(data, bounds) in (None, wanted)
            if not any("\0" in one for one in wanted):
                assert split_texts(data, bounds) == wanted


def test_most_texts_are_passed_without_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [f"token {number}" for number in range(5000)]
    data = np.frombuffer(array(wanted), np.uint8)
    monkeypatch.setattr(gguf_texts, "FEW", 2)
    looped: list[int] = []
    monkeypatch.setattr(
        gguf_texts, "_ends_one_by_one", lambda *given: looped.append(given[2]) or _ends_one_by_one(*given)
    )
    assert len(text_bounds(data, 0, len(wanted), MOST)) == len(wanted) + 1
    assert sum(looped) <= 2, "the last one, whose end the search does not see, and no other"


def test_a_text_that_is_too_long_or_no_utf8_ends_it() -> None:
    data = np.frombuffer(array(["a", "b", "x" * (MOST + 1), "c"]), np.uint8)
    assert text_bounds(data, 0, 4, MOST).tolist() == [0, 9, 18]
    data = np.frombuffer(array(["a", "b"])[:-1] + b"\xff", np.uint8)
    assert split_texts(data, text_bounds(data, 0, 2, MOST)) is None
    # A character that two texts share in halves is in none of them.
    data = np.frombuffer(struct.pack("<Q", 1) + b"\xc3" + struct.pack("<Q", 1) + b"\xa9", np.uint8)
    assert split_texts(data, text_bounds(data, 0, 2, MOST)) is None
