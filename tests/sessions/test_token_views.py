"""What is seen of a token equals what transformers computes, and looking changes nothing."""

from __future__ import annotations

import base64
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from tests.small_llms import (
    VOCAB,
    Checkpoint,
    MakeLLM,
    attention_layer,
    check,
    engine_of,
    greedy,
    make_family,
    random_tokens,
    record,
)

from quire import LLM, SamplingParams
from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.base.sampling_params import StructuredOutputs
from quire.sampling.generations import MOST_GENERATIONS
from quire.sessions import generation

LENGTH = 30
EPS = float(torch.finfo(torch.float32).eps)
CLOSE = 2**10 * EPS
"""How far apart log-probabilities of two float32 runs of two layers may be: the logits are sums of
some hundred rounded terms, and at most about 10."""


def snapshot(llm: LLM) -> tuple[Any, ...]:
    """What looking may not change."""
    engine = engine_of(llm)
    state, branches = engine.runner.state, engine.branches
    sessions = [(key, one.seq, one.computed, one.mark) for key, one in branches.sessions.items()]
    cached = None if engine.cache is None else (list(engine.cache._entries), engine.cache.ages())
    return sessions, cached, sorted(state.sequence_ids()), state.num_used_pages, state.num_checkpoints


# -- a token ---------------------------------------------------------------------------------------


def test_the_chances_of_every_token_are_those_of_transformers(llm: LLM, checkpoint: Checkpoint) -> None:
    tokens = random_tokens(LENGTH)
    session = llm.session(tokens).append([])
    exact_TV, bound = checkpoint.exact_logits(tokens)
    logprobs_TV = torch.log_softmax(exact_TV, -1)
    session.compute()
    before = snapshot(llm)
    for position in range(1, LENGTH + 1):
        view, wanted_V = session.token(position), logprobs_TV[position - 1]
        assert view.position == position
        assert view.num_tokens == LENGTH
        assert [one.rank for one in view.alternatives] == list(range(1, 11))
        for one in view.alternatives:
            assert abs(one.logprob - float(wanted_V[one.id])) <= 2 * bound
        assert view.entropy == pytest.approx(float(-(wanted_V.exp() * wanted_V).sum()), abs=20 * bound)
        assert view.exact
        if position == LENGTH:
            assert (view.token, view.id) == (None, None)
            continue
        assert view.token is not None
        assert view.id == view.token.id == tokens[position]
        assert abs(view.token.logprob - float(wanted_V[tokens[position]])) <= 2 * bound
        nearer = int((wanted_V > wanted_V[tokens[position]] + 4 * bound).sum())
        farther = int((wanted_V < wanted_V[tokens[position]] - 4 * bound).sum())
        assert nearer < view.token.rank <= VOCAB - farther
        assert view.computed
        assert not view.generated
    assert snapshot(llm) == before
    check(llm)
    session.close()


def test_the_first_token_has_no_chances(small: LLM) -> None:
    with small.session([7, 8]) as session:
        view = session.token(0)
        assert (view.id, view.token, view.alternatives, view.entropy) == (7, None, (), None)
        assert not view.computed
    with small.session() as session:
        assert session.token(0).id is None


def test_known_logits_are_not_computed_again(small: LLM) -> None:
    with small.session(random_tokens(9)) as session:
        logits_V = session.logits()
        recorder = record(small)
        view = session.token(9, top=VOCAB)
        assert not recorder.forwards
        assert not view.computed
        assert view.num_run == 0
        order = torch.sort(logits_V, descending=True, stable=True).indices.tolist()
        assert [one.id for one in view.alternatives] == order
        assert sum(math.exp(one.logprob) for one in view.alternatives) == pytest.approx(1)


def test_one_token_runs_where_the_state_is_there_and_all_where_it_is_not(small: LLM) -> None:
    with small.session(random_tokens(20)) as session, small.session(random_tokens(9, seed=3)) as later:
        session.compute()
        assert later.token(9).num_run > 0
        recorder = record(small)
        here = session.token(12)
        assert here.num_run == 1
        assert [one.num_tokens for one in recorder.forwards] == [1]
        engine_of(small).branches.drop(session._branch)
        small.generate([random_tokens(20)[:8]], greedy(1))  # which the session's own state would replace
        later.logits()  # the session used last
        before = snapshot(small)
        assert before[1], "a prefix of the session is cached"
        again = session.token(12)
        assert again.num_run == 12
        session.attention(11, 0)
        session.norms(0)
        session.compare(session)
        session.tree()
        assert snapshot(small) == before
        assert session.num_computed == 0, "looking does not wake a session"
        assert again.token is not None
        assert here.token is not None
        assert again.token.logprob == pytest.approx(here.token.logprob, abs=CLOSE)
        assert again.token.rank == here.token.rank
    check(small)


def test_what_was_written_is_read_as_it_is(small: LLM) -> None:
    with small.session(random_tokens(12)) as session:
        before = session.token(8).token
        layer = session.kv(0)
        session.set_kv(0, start=2, v=layer["v"][2:4] + 3)
        written = session.token(8)
        assert before is not None
        assert written.token is not None
        assert abs(written.token.logprob - before.logprob) > 1e-3
        assert not written.exact
        assert written.num_run == 1
        assert session.token(2).token is not None
        with session.fork() as fork:
            fork.rewind(to=8)
            wanted_V = torch.log_softmax(fork.logits().double(), -1)
        assert written.token.logprob == pytest.approx(float(wanted_V[written.token.id]), abs=CLOSE)
    check(small)


def test_what_would_have_to_run_again_after_a_write_is_refused(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="8MiB")
    with llm.session(random_tokens(21)) as session:
        layer = next(index for index, spec in enumerate(llm.model.layer_specs) if spec.kind == "recurrent")
        session.set_kv(layer, state_0=session.kv(layer)["state_0"] * 2)
        before = snapshot(llm)
        with pytest.raises(FailedPrecondition, match="written into"):
            session.token(15)
        with llm.session(session.tokens[:10]) as other, pytest.raises(FailedPrecondition, match="written into"):
            session.compare(other)
        assert snapshot(llm) == before
        assert session.token(21).exact is False
    check(llm)


def test_blended_state_is_not_computed_again(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    """As if a part of it had been blended: a model with recurrent layers must go back further."""
    llm = make_llm(hybrid, kv_cache_memory="8MiB")
    with llm.session(random_tokens(60)) as session:
        session.compute()
        state = session._branch
        held = engine_of(llm).runner.state.nearest_reachable(state.seq, 44)
        assert session.token(45).num_run == 45 - held > 1
        state.origin = type(state.origin)(inexact_from=30)
        assert session.token(20).exact
        assert not session.token(60).exact
        with pytest.raises(FailedPrecondition, match="blended or converted"):
            session.token(45)
    check(llm)


def test_hybrid_models_run_again_from_the_nearest_state(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm, tokens = make_llm(hybrid, kv_cache_memory="8MiB"), random_tokens(LENGTH)
    exact_TV, bound = hybrid.exact_logits(tokens)
    with llm.session(tokens) as session:
        session.compute()
        before = snapshot(llm)
        for position in (1, 11, 17, LENGTH - 1, LENGTH):
            view = session.token(position)
            wanted_V = torch.log_softmax(exact_TV[position - 1], -1)
            for one in view.alternatives:
                assert abs(one.logprob - float(wanted_V[one.id])) <= 4 * bound
        assert snapshot(llm) == before
    check(llm)


def test_refusals(small: LLM) -> None:
    session = small.session(random_tokens(5))
    for wrong in (-1, 6, "3", 1.0, True):
        with pytest.raises(InvalidArgument) as caught:
            session.token(wrong)
        assert caught.value.field == "position"
    for wrong in (0, 101, "5"):
        with pytest.raises(InvalidArgument) as caught:
            session.token(2, top=wrong)
        assert caught.value.field == "top"
    for wrong in (-1, 5):
        with pytest.raises(InvalidArgument):
            session.attention(wrong, 0)
    for wrong in (-1, 2, "0"):
        with pytest.raises(InvalidArgument) as caught:
            session.attention(2, wrong)
        assert caught.value.field == "layer"
        with pytest.raises(InvalidArgument):
            session.norms(wrong)
    for wrong in (-1, 4, "0"):
        with pytest.raises(InvalidArgument) as caught:
            session.attention(2, 0, wrong)
        assert caught.value.field == "head"
    with pytest.raises(InvalidArgument) as caught:
        session.compare("no session")
    assert caught.value.field == "other"
    with small.session() as empty, pytest.raises(InvalidArgument, match="empty"):
        empty.attention(0, 0)
    stream = session.stream(greedy(4))
    next(stream)
    for look in (lambda: session.token(2), lambda: session.attention(2, 0), lambda: session.norms(0)):
        with pytest.raises(FailedPrecondition, match="generating"):
            look()
    with small.session([1, 2]) as other, pytest.raises(FailedPrecondition, match="generating"):
        other.compare(session)
    stream.close()
    session.close()
    with pytest.raises(FailedPrecondition, match="closed"):
        session.token(1)


def test_many_threads_look_while_others_generate(small: LLM) -> None:
    session, busy = small.session(random_tokens(40)), small.session(random_tokens(40, seed=1))
    session.compute()
    wanted = [session.token(position).token for position in range(1, 40)]
    found: list[Any] = []

    def look() -> None:
        found.append([session.token(position).token for position in range(1, 40)])

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    busy.generate(greedy(30))
    for thread in threads:
        thread.join()
    for chances in found:
        for one, other in zip(chances, wanted, strict=True):
            assert one.id == other.id
            assert one.logprob == pytest.approx(other.logprob, abs=CLOSE)
    check(small)
    session.close()
    busy.close()


# -- notes of generations --------------------------------------------------------------------------


def test_stops_are_noted_and_follow_forks_and_rewinds(small: LLM) -> None:
    with small.session(random_tokens(6)) as session:
        session.generate(greedy(5))
        session.append([9, 9])
        assert [session.token(position).generated for position in range(len(session) + 1)] == (
            [False] * 6 + [True] * 5 + [False] * 3
        )
        stop = session.token(11).stop
        assert stop is not None
        assert (stop.finish_reason, stop.start) == ("length", 6)
        assert session.token(10).stop is None
        with session.fork(at=9) as fork:
            fork.append([1, 2, 3, 4])
            assert [fork.token(position).generated for position in range(6, 13)] == [True] * 3 + [False] * 4
            assert all(fork.token(position).stop is None for position in range(14))
            last = fork.tokens[-1]
            text = fork.generate(greedy(8, ignore_eos=False))
            assert fork.tokens[12] == last
            assert fork.token(len(fork)).stop is not None, text
        session.rewind(to=8)
        session.append([3] * 4)
        assert session.token(11).stop is None
        assert not session.token(8).generated
        assert session.token(7).generated


def test_stop_tokens_and_masks_are_noted(python_llm: LLM) -> None:
    form = StructuredOutputs(regex="[a-c]{6}")
    with python_llm.session("x = ") as session:
        start = len(session)
        params = SamplingParams(temperature=1, seed=3, max_tokens=12, structured_outputs=form)
        output = session.generate(params).outputs[0]
        views = [session.token(position) for position in range(start, len(session))]
        assert output.text == session.text[len("x = ") :]
        assert all(view.mask is not None and view.mask.kind == "regex" for view in views)
        counts = [view.mask.allowed for view in views if view.mask is not None]
        assert all(count is None or 0 < count < views[0].vocab_size for count in counts)
        assert any(count is not None for count in counts)
        end = session.token(len(session))
        assert end.stop is not None
        assert end.stop.finish_reason == "stop"
        session.append("y")
        assert session.token(len(session)).mask is None
        with session.fork(at=start + 1) as fork:
            mask = fork.token(start).mask
            assert mask is not None
            assert mask.allowed == counts[0]
            assert fork.token(start + 1).mask is None
    with python_llm.session("x = ") as session:
        output = session.generate(SamplingParams(temperature=0, max_tokens=60, stop=["00"])).outputs[0]
        assert output.stop_reason == "00"
        stop = session.token(len(session)).stop
        assert stop is not None
        assert (stop.finish_reason, stop.stop_reason) == ("stop", "00")


def test_the_number_of_allowed_tokens_is_that_of_the_mask(python_llm: LLM) -> None:
    """Of a choice of single characters, the mask allows the tokens that begin one of them."""
    tokenizer = engine_of(python_llm).tokenizer
    assert tokenizer is not None
    form = StructuredOutputs(regex="[xyz]")
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=3, structured_outputs=form)
    with python_llm.session("a") as session:
        session.generate(params)
        mask = session.token(1).mask
        assert mask is not None
        fitting = [t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes.piece(t) in (b"x", b"y", b"z")]
        assert mask.allowed in (len(fitting), None)


def test_a_request_that_parts_from_the_session_cuts_its_notes(small: LLM) -> None:
    """As a chat whose template writes an answer in another way than the model did."""
    with small.session([1, 2, 3]) as session:
        session.generate(greedy(6))
        tokens = np.array([*session.tokens[:5], 50, 51, 52, 53], dtype=np.int64)
        with engine_of(small).lock:
            request = generation.submit(session._live, tokens, greedy(2))
        generation.result(session._live, request)
        assert [session.token(position).generated for position in range(11)] == (
            [False] * 3 + [True] * 2 + [False] * 4 + [True] * 2
        )


def test_notes_stay_few(small: LLM) -> None:
    with small.session([1]) as session:
        for _ in range(MOST_GENERATIONS + 3):
            session.generate(greedy(1))
        assert len(session._branch.generations) == MOST_GENERATIONS
        assert not session.token(1).generated
        assert session.token(len(session) - 1).generated


def test_an_edit_keeps_the_notes_before_it(python_llm: LLM) -> None:
    with python_llm.session("one two ") as session:
        start = len(session)
        session.generate(SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        session.append("three four")
        session.edit("three", "3")
        assert session.token(start).generated
        session.edit("two", "2")
        assert not any(session.token(position).generated for position in range(len(session)))


# -- attention -------------------------------------------------------------------------------------


ATTENTION = ("llama3", "mistral-window", "gemma2", "gemma3", "gpt-oss", "deepseek-v3", "falcon-h1", "qwen3-next")
"""Every kind of layer that attends: windows, soft caps, sinks, latent rows, beside recurrences."""


@pytest.fixture(scope="module", params=ATTENTION)
def attending(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.turns(3)
def test_attention_is_what_transformers_says(make_llm: MakeLLM, attending: Checkpoint) -> None:
    """Against float64, at every position, layer and head."""
    tokens = random_tokens(20)
    attending.model.set_attn_implementation("eager")
    exact = attending.model.double()
    try:
        with torch.inference_mode():
            wanted = exact(torch.tensor([tokens]), output_attentions=True).attentions
    finally:
        attending.model.float()
    llm = make_llm(attending.path, kv_cache_memory="8MiB")
    attended = [layer for layer, spec in enumerate(llm.model.layer_specs) if spec.kind not in ("recurrent", "cross")]
    # Where a block has two kinds of layers, transformers counts blocks.
    wanted = [one for one in wanted if one is not None]
    assert len(wanted) == len(attended)
    with llm.session(tokens) as session:
        session.compute()
        for position in (0, 1, 6, 11, 19):
            for layer, expected in zip(attended, wanted, strict=True):
                view = session.attention(position, layer)
                weights_HN = torch.from_numpy(view.weights).double()
                expected_HN = expected[0, :, position, : position + 1].double()
                # A model of a few layers magnifies the rounding of its scores.
                assert float((weights_HN - expected_HN).abs().max()) < 2 * CLOSE
                sums = view.weights.sum(-1, dtype=np.float64) + view.sinks
                assert np.abs(sums - 1).max() < 20 * EPS
                assert (view.sinks > 0).all() == bool(getattr(llm.model.layer_specs[layer], "sinks", ()))
                one = session.attention(position, layer, head=1)
                assert one.heads == (1,)
                assert np.array_equal(one.weights[0], view.weights[1])
    check(llm)


def test_attention_is_the_softmax_of_the_stored_keys(small: LLM, llama: Checkpoint) -> None:
    """Against float64 on the K that the session holds: the query comes from a hook."""
    tokens, position = random_tokens(15), 9
    with small.session(tokens) as session:
        session.compute()
        for layer in range(2):
            found: list[torch.Tensor] = []
            attention = llama.model.model.layers[layer].self_attn
            hook = attention.q_proj.register_forward_hook(lambda _m, _i, out, found=found: found.append(out))
            with torch.inference_mode():
                llama.model(torch.tensor([tokens]))
            hook.remove()
            q_HD = found[0][0, position].view(4, 16).double()
            theta = llama.model.config.rope_parameters["rope_theta"]
            angles = position * theta ** (-torch.arange(0, 16, 2).double() / 16)
            cos, sin = angles.cos().repeat(2), angles.sin().repeat(2)
            turned = torch.cat((-q_HD[:, 8:], q_HD[:, :8]), -1)
            q_HD = q_HD * cos + turned * sin
            k_NHD = session.kv(layer)["k"][: position + 1].double().repeat_interleave(2, 1)
            wanted = torch.softmax(torch.einsum("hd,nhd->hn", q_HD, k_NHD) / 4, -1)
            view = session.attention(position, layer)
            assert float((torch.from_numpy(view.weights).double() - wanted).abs().max()) < CLOSE


def test_a_session_window_shows_in_the_weights(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    with llm.session(random_tokens(50), window=16, sink=2) as session:
        session.compute()
        view = session.attention(49, 1)
        assert view.weights.shape == (4, 50)
        seen = np.flatnonzero(view.weights.any(0)).tolist()
        assert seen == [0, 1, *range(36, 50)]
        assert np.abs(view.weights.sum(-1) - 1).max() < 20 * EPS
    check(llm)


def test_recurrent_layers_have_no_attention(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="8MiB")
    layer = next(index for index, spec in enumerate(llm.model.layer_specs) if spec.kind == "recurrent")
    with llm.session(random_tokens(5)) as session:
        with pytest.raises(Unsupported, match="recurrent"):
            session.attention(2, layer)
        assert session.attention(2, attention_layer(llm)).weights.shape[1] == 3


def test_only_the_observed_layer_is_weighed(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kv import state_pass

    weighed, weigh = [], state_pass.attention_weights
    monkeypatch.setattr(
        state_pass, "attention_weights", lambda *args, **given: weighed.append(1) or weigh(*args, **given)
    )
    with small.session(random_tokens(5)) as session:
        session.compute()
        session.attention(3, 1)
        assert len(weighed) == 1
        session.token(3)
        assert len(weighed) == 1


# -- norms -----------------------------------------------------------------------------------------


def test_norms_are_those_of_what_is_stored(make_llm: MakeLLM, attending: Checkpoint) -> None:
    llm = make_llm(attending.path, kv_cache_memory="8MiB")
    with llm.session(random_tokens(20)) as session:
        session.compute()
        before = snapshot(llm)
        views = [session.norms(layer) for layer in range(len(llm.model.layer_specs))]
        assert snapshot(llm) == before
        for layer, view in enumerate(views):
            held = session.kv(layer)
            if view.kind == "recurrent":
                assert view.positions.tolist() == [19]
                for name, values in view.norms.items():
                    whole = held[name].double()
                    wanted = whole.flatten(1).norm(dim=-1) if whole.dim() == 3 else whole.norm()[None]
                    assert np.allclose(values[-1], wanted.numpy(), rtol=CLOSE)
                continue
            positions = held.pop("positions", torch.arange(20))
            rows = {name: values[positions < 19] for name, values in held.items()}
            # ``kv`` has run the last token, too.
            assert set(view.norms) == set(rows)
            assert set(positions[positions < 19].tolist()) <= set(view.positions.tolist())
            at = np.searchsorted(view.positions, positions[positions < 19].numpy())
            for name, values in rows.items():
                wanted = values.double().norm(dim=-1)
                wanted = wanted if wanted.dim() == 2 else wanted[:, None]
                assert np.allclose(view.norms[name][at], wanted.numpy(), rtol=CLOSE)
    check(llm)


def test_what_is_not_in_the_pool_has_no_norms(small: LLM) -> None:
    with small.session(random_tokens(8)) as session:
        session.compute()
        assert session.norms(0).positions.tolist() == list(range(7))
        engine_of(small).branches.drop(session._branch)
        view = session.norms(0)
        assert view.positions.size == 0
        assert view.norms["k"].shape == (0, 2)
        assert session.num_computed == 0


def test_a_session_without_computed_tokens_has_no_norms(make_llm: MakeLLM, attending: Checkpoint) -> None:
    llm = make_llm(attending.path, kv_cache_memory="8MiB")
    with llm.session(random_tokens(8)) as session:
        session.rewind(to=0)
        for layer in range(len(llm.model.layer_specs)):
            view = session.norms(layer)
            assert view.positions.size == 0
            assert {len(one) for one in view.norms.values()} == {0}


# -- two sessions ----------------------------------------------------------------------------------


def test_two_sessions_are_compared_where_they_part(small: LLM, llama: Checkpoint) -> None:
    tokens = random_tokens(12)
    logprobs_V = torch.log_softmax(llama.exact_logits(tokens)[0][-1], -1)
    with small.session([*tokens, 3, 4]) as a, small.session([*tokens, 8]) as b:
        view = a.compare(b)
        assert view.shared == 12
        assert (view.a.id, view.b.id) == (3, 8)
        for side, own, other in ((view.a, 3, 8), (view.b, 8, 3)):
            assert side.token is not None
            assert side.other is not None
            assert (side.token.id, side.other.id) == (own, other)
            assert side.token.logprob == pytest.approx(float(logprobs_V[own]), abs=CLOSE)
            assert side.other.logprob == pytest.approx(float(logprobs_V[other]), abs=CLOSE)
        assert view.divergences == pytest.approx((0, 0), abs=CLOSE**2)
        with a.fork(at=12) as short:
            ends = short.compare(a)
            assert (ends.shared, ends.a.id, ends.a.token) == (12, None, None)
            assert ends.a.other is not None
            assert ends.a.other.id == 3
        with small.session([50, 51]) as other:
            nothing = a.compare(other)
            assert (nothing.shared, nothing.divergences, nothing.a.token) == (0, None, None)
        a.set_kv(0, start=4, v=a.kv(0)["v"][4:6] + 2)
        written = a.compare(b)
        assert written.divergences is not None
        assert min(written.divergences) > 1e-6
        assert (written.a.exact, written.b.exact) == (False, True)
        p, q = (
            torch.tensor([one.logprob for one in sorted(side.alternatives, key=lambda one: one.id)]).double()
            for side in (a.compare(b, top=VOCAB).a, a.compare(b, top=VOCAB).b)
        )
        assert written.divergences[0] == pytest.approx(float((p.exp() * (p - q)).sum()), rel=CLOSE * 100)
    check(small)


# -- documents -------------------------------------------------------------------------------------


def test_documents_are_json(small: LLM) -> None:
    import json

    with small.session(random_tokens(6)) as session:
        session.generate(greedy(2))
        token = json.loads(json.dumps(session.token(6).document(), allow_nan=False))
        assert token["token"]["id"] == session.tokens[6]
        attention = json.loads(json.dumps(session.attention(4, 1).document(), allow_nan=False))
        weights = np.frombuffer(base64.b64decode(attention["weights"]), "<f4").reshape(attention["shape"])
        assert np.array_equal(weights, session.attention(4, 1).weights)
        norms = json.loads(json.dumps(session.norms(0).document(), allow_nan=False))
        assert [one["name"] for one in norms["norms"]] == ["k", "v"]
        assert np.frombuffer(base64.b64decode(norms["positions"]), "<i4").tolist() == list(range(7))
        compared = json.loads(json.dumps(session.compare(session).document(), allow_nan=False))
        assert compared["kl_ab"] == 0


def test_impossible_tokens_have_no_logprob_in_json(small: LLM) -> None:
    with small.session([1, 2]) as session:
        session.logits()
        session._branch.logits[5] = -math.inf
        found = {one["id"]: one for one in session.token(2, top=VOCAB).document()["alternatives"]}
        assert found[5]["logprob"] is None
        assert found[5]["probability"] == 0
