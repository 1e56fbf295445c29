"""Sessions with a window and a sink of their own: against StreamingLLM as it is defined, and
endless.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.small_llms import CONTEXT, Checkpoint, MakeLLM, check, engine_of, greedy, random_tokens
from torch import Tensor

from quire import LLM, DataLoss, InvalidArgument
from quire.branches import saved_rows
from quire.contracts.rows import HeadNormWeights
from quire.ops.attention import attend
from quire.ops.rope import inverse_frequencies
from quire.ops.rows import REFERENCE_ROWS, normed_heads
from quire.statefile.container import read_state
from quire.statefile.schema import Fault, StoredSession, fitted

WINDOW, SINK = 20, 3


class StreamingPass:
    """Each query attends to the sink and the last tokens, all keys rotated anew at their place in
    that cache.
    """

    def __init__(self, llm: LLM, length: int) -> None:
        self.specs = engine_of(llm).runner.model.layer_specs
        self.length = length

    @property
    def positions_T(self) -> Tensor:
        return torch.arange(self.length, dtype=torch.int32)

    def attention_parts(self, layer_id: int, norms: HeadNormWeights | None, dtype: torch.dtype) -> None:
        """The block does not run whole."""

    def attend_qkv(self, layer_id: int, qkv_TC: Tensor, norms: HeadNormWeights | None = None) -> Tensor:
        spec = self.specs[layer_id]
        sizes = [spec.num_heads * 16, spec.num_kv_heads * 16, spec.num_kv_heads * 16]  # type: ignore[union-attr]
        q, k, v = (part.view(self.length, -1, 16) for part in qkv_TC.split(sizes, -1))
        q, k = normed_heads(REFERENCE_ROWS, q, k, norms)
        out = torch.empty_like(q)
        for position in range(self.length):
            kept = [i for i in range(position + 1) if i < SINK or i > position - (WINDOW - SINK)]
            place = torch.arange(len(kept))
            keys = turn(k[kept], place, spec.rope)  # type: ignore[union-attr]
            query = turn(q[position : position + 1], place[-1:], spec.rope)  # type: ignore[union-attr]
            visible = torch.ones(1, len(kept), dtype=torch.bool)
            out[position] = attend(query, keys, v[kept], visible, spec.scale).out[0]  # type: ignore[union-attr]
        return out


def turn(x_THD: Tensor, positions_T: Tensor, rope: object) -> Tensor:
    angle = positions_T.double()[:, None, None] * inverse_frequencies(rope)  # type: ignore[arg-type]
    first, second = x_THD.double().chunk(2, -1)
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1).to(
        x_THD.dtype
    )


@torch.inference_mode()
def streaming_logits(llm: LLM, tokens: Sequence[int]) -> Tensor:
    model = engine_of(llm).runner.model
    pass_ = StreamingPass(llm, len(tokens))
    x = model.embed(torch.tensor(list(tokens)))
    for block in model.blocks:
        x = block(x, pass_)  # type: ignore[arg-type]
    return model.head(x)


def continues(llm: LLM, prompt: Sequence[int], found: Sequence[int]) -> bool:
    best = streaming_logits(llm, [*prompt, *found[:-1]])[len(prompt) - 1 :].argmax(-1)
    return list(found) == best.tolist()


@pytest.mark.turns(2)
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 512), (4, 7), (16, 16), (5, 512)])
def test_tokens_are_those_of_streaming_attention(
    make_llm: MakeLLM, llama: Checkpoint, page_size: int, chunk: int
) -> None:
    llm = make_llm(llama, page_size=page_size, max_num_batched_tokens=chunk)
    prompt = random_tokens(33)
    session = llm.session(prompt, window=WINDOW, sink=SINK)
    assert session.window == (WINDOW, SINK)
    found = session.generate(greedy(40)).outputs[0].token_ids
    assert continues(llm, prompt, found)
    assert found != llama.greedy(prompt, 40), "the window shows"
    child = session.fork()
    more = child.append(random_tokens(11)).generate(greedy(9)).outputs[0].token_ids
    assert continues(llm, child.tokens[:-9], more)
    assert child.window == session.window
    check(llm)


def test_rewind_within_and_behind_the_window(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=4)
    session = llm.session(random_tokens(50), window=WINDOW, sink=SINK)
    session.generate(greedy(30))
    for to in (78, 76, 60, 19, 2):
        child = session.fork()
        cost = child.rewind_cost(to)
        assert child.rewind(to=to) == cost
        # The last forward began at 78, its window at 62, in the page of 60; behind 60 + 16 all is
        # held. In the sink, too.
        assert (cost == 0) == (to >= 76 or to <= SINK)
        found = child.generate(greedy(6)).outputs[0].token_ids
        assert continues(llm, session.tokens[:to], found)
        child.close()
    check(llm)


def test_endless_in_constant_memory(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Beyond the model's context and beyond the pool."""
    llm = make_llm(llama, pool=64, page_size=4, max_num_batched_tokens=16)
    state = engine_of(llm).runner.state
    session = llm.session(random_tokens(100), window=WINDOW, sink=SINK)
    used = set()
    for _ in range(30):
        session.generate(greedy(11))
        used.add(state.num_used_pages)
    assert len(session) == 430 > CONTEXT
    # Sink, window and what has not left yet: the bound of the specification.
    assert max(used) <= 1 + -(-(WINDOW - SINK + 1) // 4) + 1
    assert continues(llm, session.tokens[:-5], session.tokens[-5:])
    session.close()
    with pytest.raises(InvalidArgument, match="context"):
        llm.session(random_tokens(CONTEXT + 1))


def test_saved_and_loaded(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path) -> None:
    llm, other = make_llm(llama, page_size=4), make_llm(llama, page_size=7)
    session = llm.session(random_tokens(70), window=WINDOW, sink=SINK)
    session.save(tmp_path / "s.quire")
    restored = other.load_session(tmp_path / "s.quire")
    assert restored.window == (WINDOW, SINK)
    assert restored.tokens == session.tokens
    assert restored.num_computed == 69, "loaded, not computed"
    want = session.generate(greedy(20)).outputs[0].token_ids
    assert restored.generate(greedy(20)).outputs[0].token_ids == want
    with read_state(tmp_path / "s.quire") as file:
        assert file.metadata["window"] == [WINDOW, SINK]
    empty = llm.session_from_bytes(llm.session([], window=9).to_bytes())
    assert empty.window == (9, 0)
    check(other)


def test_shares_no_prefix_with_sessions_without_a_window(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    prompt = random_tokens(60)
    assert llm.generate(prompt, greedy(8))[0].outputs[0].token_ids == llama.greedy(prompt, 8)
    session = llm.session(prompt, window=WINDOW, sink=SINK)
    assert continues(llm, prompt, session.generate(greedy(8)).outputs[0].token_ids)
    session.close()
    assert llm.generate(prompt, greedy(8))[0].outputs[0].token_ids == llama.greedy(prompt, 8)


@pytest.mark.parametrize(
    ("window", "sink", "reason"),
    [
        (0, 0, "0 <= sink < window"),
        (4, 4, "0 <= sink < window"),
        (4, -1, "0 <= sink"),
        (CONTEXT + 1, 0, "context"),
        (None, 2, "without a window"),
        ("8", 0, "integer"),
        (True, 0, "integer"),
        (8, 1.5, "integer"),
    ],
)
def test_bad_windows(make_llm: MakeLLM, llama: Checkpoint, window: object, sink: object, reason: str) -> None:
    llm = make_llm(llama)
    with pytest.raises(InvalidArgument, match=reason):
        llm.session([1, 2, 3], window=window, sink=sink)  # type: ignore[arg-type]
    assert engine_of(llm).runner.state.empty()


def test_a_file_whose_windows_contradict_each_other() -> None:
    model = {"architecture": "a", "config": "b", "weights": "c", "length": ""}
    session: dict[str, object] = {
        "kind": "session", "model": model, "adapters": [], "exact": True, "modified": False, "window": None,
        "tokens": [1, 2], "positions": [0, 2], "sequence": None,
    }  # fmt: skip
    for wrong in ([3], "x", [True, 0], [0, 0], [3, -1], [3, 1, 1]):
        with pytest.raises(Fault, match="window"):
            fitted({**session, "window": wrong}, StoredSession, "")
    assert fitted({**session, "window": [3, 1]}, StoredSession, "").window == (3, 1)
    with pytest.raises(DataLoss, match="window"):
        saved_rows.window_of({"window": [3, 3]})
    assert saved_rows.window_of({}) is None
