"""What tries everything that users call on a model, but for executors, on each combination of
layers.

Each check is given a ``Bed``: a tiny random model here and in transformers. Letters: T tokens; V
vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from tests.exact import Float64
from tests.rule_beds import OPTIONS, PROMPT, Bed, causal_mask, refused
from tests.small_llms import CONTEXT, check, engine_of, greedy, random_tokens
from torch import Tensor

from quire import AsyncLLM, BeamSearchParams, BlendParams, SamplingParams, Segment, StructuredOutputs
from quire.base.types import Commit, Fork, Pop, Step, TokenTree
from quire.kv.layer_memory import read


def generate(bed: Bed) -> None:
    prompts = [random_tokens(length) for length in (30, 1, 9)]
    for given, output in zip(prompts, bed.llm.generate(prompts, greedy(6)), strict=True):
        assert bed.checkpoint.continues(given, output.outputs[0].token_ids)


def samples(bed: Bed) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=5, ignore_eos=True)
    alone = bed.llm.generate(PROMPT, params)[0].outputs
    among = bed.llm.generate([random_tokens(9), PROMPT], [greedy(5), params])[1].outputs
    assert [one.token_ids for one in alone] == [one.token_ids for one in among]
    assert len({tuple(one.token_ids) for one in alone}) > 1


def stream_and_cancel(bed: Bed) -> None:
    with bed.llm.session(PROMPT) as session:
        found = [token for delta in session.stream(greedy(5)) for token in delta.token_ids]
        assert bed.checkpoint.continues(PROMPT, found)
        stream = session.stream(greedy(9))
        found += next(stream).token_ids
        assert session.cancel()
        found += [token for delta in stream for token in delta.token_ids]
        bed.goes_on(session, [*PROMPT, *found])


def in_the_background(bed: Bed) -> None:
    async def use() -> list[Any]:
        llm = AsyncLLM(bed.checkpoint.path, **OPTIONS)
        try:
            prompts = [random_tokens(length) for length in (30, 9)]
            return [(await llm.generate(prompts, greedy(4))), prompts]
        finally:
            await llm.close()

    outputs, prompts = asyncio.run(use())
    for given, output in zip(prompts, outputs, strict=True):
        assert bed.checkpoint.continues(given, output.outputs[0].token_ids)


def beams(bed: Bed) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    found = bed.llm.beam_search([PROMPT], params)[0].sequences
    assert len(found) == 3
    best = -torch.inf
    for sequence in found:
        exact_TV, bound = bed.checkpoint.exact_logits([*PROMPT, *sequence.token_ids])
        logprobs = exact_TV[len(PROMPT) - 1 : -1].log_softmax(-1)[range(4), sequence.token_ids]
        assert abs(sequence.cum_logprob - float(logprobs.sum())) <= 4 * 2 * bound
        best = max(best, float(logprobs.sum()))
    text = bed.checkpoint.greedy(PROMPT, 4)
    exact_TV, bound = bed.checkpoint.exact_logits([*PROMPT, *text])
    straight = float(exact_TV[len(PROMPT) - 1 : -1].log_softmax(-1)[range(4), text].sum())
    assert best >= straight - 8 * bound or len(found) == 3, "a wider search"


def structured(bed: Bed) -> None:
    words = ["lazy dog", "quick fox", "two spaces"]
    params = greedy(12, ignore_eos=False, structured_outputs=StructuredOutputs(choice=words))
    outputs = bed.llm.generate([PROMPT, random_tokens(9)], params)
    assert all(output.outputs[0].text in words for output in outputs)


def processors(bed: Bed) -> None:
    """The best token is forbidden: the second is taken."""

    def second(token_ids: list[int], logits: Tensor) -> Tensor:
        return logits.index_fill(0, logits.argmax(), -torch.inf)

    found = bed.llm.generate(PROMPT, greedy(4, logits_processors=[second]))[0].outputs[0].token_ids
    logits_TV = bed.checkpoint.logits([*PROMPT, *found[:-1]])[len(PROMPT) - 1 :]
    assert found == logits_TV.topk(2).indices[:, 1].tolist()


def prompt_logprobs(bed: Bed) -> None:
    output = bed.llm.generate(PROMPT, greedy(1, prompt_logprobs=0))[0]
    exact_TV, bound = bed.checkpoint.exact_logits(PROMPT)
    wanted = exact_TV.log_softmax(-1)
    assert output.prompt_logprobs is not None
    for position in range(1, len(PROMPT)):
        one = output.prompt_logprobs[position]
        assert one is not None
        assert abs(one[PROMPT[position]].logprob - float(wanted[position - 1, PROMPT[position]])) <= 2 * bound


def prefix(bed: Bed) -> None:
    bed.llm.reset_prefix_cache()
    bed.llm.generate(PROMPT, greedy(3))
    text = [*PROMPT, *random_tokens(7)]
    output = bed.llm.generate(text, greedy(4))[0]
    assert output.num_cached_tokens >= len(PROMPT) - 1
    assert bed.checkpoint.continues(text, output.outputs[0].token_ids)


def _preempted(bed: Bed) -> None:
    """Of two requests one is preempted when most of its text is its own and no prompt that the
    prefix cache knows.
    """
    engine = engine_of(bed.llm)
    engine.reset_prefix_cache()
    prompts = (random_tokens(3), random_tokens(5, seed=1))
    requests = [engine.submit(np.array(given), greedy(30))[0] for given in prompts]
    for _ in range(25):
        engine.step()
    assert len(requests[1].output.token_ids) > 20
    engine.scheduler.preempt(requests[1])
    check(bed.llm)
    engine.run(requests)
    for given, request in zip(prompts, requests, strict=True):
        assert len(request.output.token_ids) == 30
        assert bed.checkpoint.continues(given, request.output.token_ids)


def preemption(bed: Bed) -> None:
    stored = engine_of(bed.llm).stored
    store, stored.store = stored.store, None
    try:
        _preempted(bed)
    finally:
        stored.store = store


def host_memory(bed: Bed) -> None:
    stored = engine_of(bed.llm).stored
    least, worth, stored.least, stored.is_worth = stored.least, stored.is_worth, 1, lambda *_: True
    before = bed.llm.metrics()["quire:store_tokens_loaded_total"]
    try:
        _preempted(bed)
    finally:
        stored.least, stored.is_worth = least, worth
    assert bed.llm.metrics()["quire:store_tokens_loaded_total"] > before


def fork(bed: Bed) -> None:
    with bed.llm.session(PROMPT) as session:
        tokens = [*PROMPT, *session.generate(greedy(6)).outputs[0].token_ids]
        for at in (1, 7, 29, 30, 33, len(tokens)):
            with session.fork(at=at) as branch:
                bed.goes_on(branch, tokens[:at])
        bed.goes_on(session, tokens)


def rewind(bed: Bed) -> None:
    with bed.llm.session(PROMPT) as session:
        tokens = [*PROMPT, *session.generate(greedy(6)).outputs[0].token_ids]
        for to in (len(tokens), 33, 30, 12, 1):
            cost = session.rewind_cost(to)
            assert session.rewind(to=to) == cost
            tokens = tokens[:to]
            bed.goes_on(session, tokens)
            session.rewind(to=to)


def edit(bed: Bed) -> None:
    with bed.llm.session(PROMPT) as session:
        tokens = [*PROMPT, *session.generate(greedy(6)).outputs[0].token_ids]
        for (start, stop), new in (((20, 24), [3, 4]), ((0, 2), []), ((30, 30), [5]), ((8, 9), [6])):
            session.edit((start, stop), new)
            tokens[start:stop] = new
            bed.goes_on(session, tokens)
            session.rewind(to=len(tokens))


def blend(bed: Bed) -> None:
    """With ratio 1 all is computed anew; below, no other prompt finds what is approximate."""
    segments = [Segment(random_tokens(length, seed=length)) for length in (20, 24)]
    bed.llm.warm(segments)
    params = BlendParams(ratio=1.0, least=1, keep=False)
    (output,) = bed.llm.generate([[segments[1], segments[0], PROMPT]], greedy(5), blend=params)
    assert output.blend is not None
    assert output.blend.blended == 0
    assert bed.checkpoint.continues(output.prompt_token_ids, output.outputs[0].token_ids)
    (output,) = bed.llm.generate([[segments[0], segments[1], PROMPT]], greedy(5), blend=BlendParams(least=1))
    assert output.blend is not None
    assert output.blend.blended > 0
    (plain,) = bed.llm.generate([output.prompt_token_ids], greedy(5))
    assert bed.checkpoint.continues(plain.prompt_token_ids, plain.outputs[0].token_ids)


def refused_blend(bed: Bed, reason: str) -> None:
    refused(bed, lambda: bed.llm.generate([[Segment(PROMPT), [5]]], greedy(1), blend=BlendParams()), reason)
    refused(bed, lambda: bed.llm.warm([PROMPT]), reason)


def score(bed: Bed) -> None:
    new = random_tokens(5, seed=3)
    exact_TV, bound = bed.checkpoint.exact_logits([*PROMPT, *new])
    wanted = exact_TV[len(PROMPT) - 1 : -1].log_softmax(-1)[range(5), new]
    with bed.llm.session(PROMPT) as session:
        assert float((torch.tensor(session.score(new), dtype=torch.float64) - wanted).abs().max()) <= 2 * bound
        bed.goes_on(session, PROMPT)


def logits(bed: Bed) -> None:
    with bed.llm.session(PROMPT) as session:
        bed.rows(session.logits()[None], PROMPT, len(PROMPT) - 1)
        bed.goes_on(session, PROMPT)


def saved_and_loaded(bed: Bed) -> None:
    with bed.llm.session(PROMPT) as session:
        tokens = [*PROMPT, *session.generate(greedy(3)).outputs[0].token_ids]
        data = session.to_bytes()
    with bed.llm.session_from_bytes(data) as loaded:
        bed.goes_on(loaded, tokens)


def read_kv(bed: Bed) -> None:
    """Every layer, against what the state of a sequence of the same tokens holds."""
    for layer, spec in enumerate(bed.llm.model.layer_specs):
        recurrent, seq = spec.kind == "recurrent", bed.new()
        with bed.llm.session(PROMPT) as session:
            found = session.kv(layer)
            bed.run(seq, PROMPT[:-1] if recurrent else PROMPT)
            wanted = read(bed.state, seq, layer, partly="positions" in found)
            bed.drop(seq)
            positions = found.pop("positions", None), wanted.pop("positions", None)
            least = 0 if positions[0] is None else min(map(len, positions))
            assert found.keys() == wanted.keys()
            # Rows of another chunking: what a sum of another order adds.
            for name, mine in found.items():
                bed.checkpoint.assert_same_memory(mine[-least:], wanted[name][-least:], PROMPT)
            bed.goes_on(session, PROMPT)


def write_kv(bed: Bed) -> None:
    """Layers are written in forks only; what is written back as it was changes nothing."""
    for layer, spec in enumerate(bed.llm.model.layer_specs):
        with bed.llm.session(PROMPT) as session, session.fork() as same, session.fork() as other:
            found = session.kv(layer)
            found.pop("positions", None)
            start = 0
            if spec.kind != "recurrent":
                start = len(PROMPT) - 4
                found = {name: rows[-4:-2] for name, rows in found.items()}
            name = "v" if "v" in found else next(iter(found))
            same.set_kv(layer, start=start, **found)
            other.set_kv(layer, start=start, **{name: -5 * found[name]})
            bed.rows(same.logits()[None], PROMPT, len(PROMPT) - 1)
            assert float((other.logits() - same.logits()).abs().max()) > 1e-3
            bed.goes_on(session, PROMPT)


def _windowed(bed: Bed, sink: int) -> None:
    """A window that holds everything changes nothing; of a small one chunks do not show."""
    with bed.llm.session(PROMPT, window=CONTEXT - 1, sink=sink) as wide:
        bed.goes_on(wide, PROMPT)
    found = []
    for pieces in ([30], [1, 6, 1, 1, 13, 8]):
        start = 0
        with bed.llm.session([], window=9, sink=sink) as session:
            for piece in pieces:
                session.append(PROMPT[start : start + piece])
                session.compute()
                start += piece
            found.append(session.logits())
    exact_V, bound = bed.checkpoint.exact_logits(PROMPT)
    assert float((found[0] - found[1]).abs().max()) <= 2 * bound
    if any(spec.kind != "window" for spec in bed.llm.model.layer_specs):
        assert float((found[0] - exact_V[-1]).abs().max()) > 10 * bound, "the window hides something"


def window(bed: Bed) -> None:
    _windowed(bed, 0)


def sink(bed: Bed) -> None:
    _windowed(bed, 2)


def trees(bed: Bed) -> None:
    parents, nodes = (-1, 0, 0, 1, -1, 3), random_tokens(6, seed=5)
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [4], [0, 1, 3, 5]]
    seq = bed.new()
    bed.run(seq, PROMPT)
    found = bed.run(seq, nodes, TokenTree(parents)).logits_RV
    for row, path in enumerate(paths):
        tokens = [*PROMPT, *(nodes[node] for node in path)]
        bed.rows(found[row][None], tokens, len(tokens) - 1)
    bed.runner.execute(Step(edits=(Commit((seq,), (3,)),)))
    tokens = [*PROMPT, *(nodes[node] for node in paths[3]), 7, 8]
    bed.rows(bed.run(seq, [7, 8]).logits_RV, tokens, len(tokens) - 2)
    bed.drop(seq)


def verify(bed: Bed) -> None:
    """Drafts run as a chunk, the last of them are taken back; what must be run again is."""
    drafts = random_tokens(6, seed=6)
    seq = bed.new()
    bed.run(seq, PROMPT)
    found = bed.run(seq, drafts).logits_RV
    bed.rows(found, [*PROMPT, *drafts], len(PROMPT))
    for accepted in (4, 1, 0):
        tokens = [*PROMPT, *drafts[:accepted]]
        start = bed.state.nearest_reachable(seq, len(tokens))
        child = bed.runner.new_seq()
        bed.runner.execute(Step(edits=(Fork(seq, child), Pop(child, len(PROMPT) + 6 - start))))
        bed.rows(bed.run(child, [*tokens[start:], 9]).logits_RV, [*tokens, 9], start)
        bed.drop(child)
    bed.drop(seq)


def mask(bed: Bed) -> None:
    """The mask of the causal rule gives what that gives; a token that nobody sees can be
    any token."""
    seq, other, third = bed.new(), bed.new(), bed.new()
    bed.rows(bed.run(seq, PROMPT, mask=causal_mask(30)).logits_RV, PROMPT, 0)
    hidden = causal_mask(30).view(30, 30).clone()
    hidden[6:, 5] = False
    found = bed.run(other, PROMPT, mask=hidden.flatten()).logits_RV
    changed = [*PROMPT[:5], (PROMPT[5] + 1) % 97, *PROMPT[6:]]
    again = bed.run(third, changed, mask=hidden.flatten()).logits_RV
    assert torch.equal(found[6:], again[6:])
    assert not torch.equal(found[5], again[5])
    bed.drop(seq, other, third)


def refused_mask(bed: Bed, reason: str) -> None:
    with bed.sequence() as seq:
        refused(bed, lambda: bed.run(seq, PROMPT, mask=causal_mask(30)), reason)


def embeddings(bed: Bed) -> None:
    seq = bed.new()
    rows = bed.runner.model.embed(torch.tensor(PROMPT[3:7]))
    given = [*PROMPT[:3], -1, -1, -1, -1, *PROMPT[7:]]
    bed.rows(bed.run(seq, given, embeddings=rows).logits_RV, PROMPT, 0)
    bed.drop(seq)


def _by_transformers(bed: Bed, name: str, **asked: bool) -> list[tuple[Tensor, Tensor]]:
    """What transformers returns under this name: in float64, and in float32."""
    bed.checkpoint.exact_logits(PROMPT)  # makes the model in float64
    found = []
    for model, mode in ((bed.checkpoint.exact, Float64()), (bed.checkpoint.model, nullcontext())):
        kind = model.config._attn_implementation
        model.set_attn_implementation("eager")
        with torch.inference_mode(), mode:
            found.append([one[0] for one in getattr(model(torch.tensor([PROMPT]), **asked), name)])
        model.set_attn_implementation(kind)
    return list(zip(*found, strict=True))


def hidden_states(bed: Bed) -> None:
    seq = bed.new()
    found = bed.run(seq, PROMPT, hidden_states=True).hidden_states[0]
    bed.drop(seq)
    wanted = _by_transformers(bed, "hidden_states", output_hidden_states=True)
    # The last one of transformers is behind the norm, the first one is what layers begin with,
    # except in Mamba-2.
    inner = wanted[:-1] if bed.checkpoint.model.config.model_type == "mamba2" else wanted[1:-1]
    if bed.combination.own_rotation:
        assert len(found) == 1
        inner = wanted[-1:]
    else:
        assert len(found) == bed.checkpoint.model.config.get_text_config().num_hidden_layers
        found = found[: len(inner)]
    for mine, (exact, theirs) in zip(found, inner, strict=True):
        _near(mine, exact, theirs)


def _near(mine: Tensor, exact: Tensor, theirs: Tensor) -> None:
    """As near to float64 as twice transformers' own float32 run, and what a sum of another order
    adds.
    """
    bound = 2 * float((theirs - exact).abs().max()) + 64 * torch.finfo(torch.float32).eps * float(exact.abs().max())
    assert mine.shape == exact.shape
    assert float((mine - exact).abs().max()) <= bound


def weights(bed: Bed) -> None:
    seq = bed.new()
    found = bed.run(seq, PROMPT, attention_weights=True).attention_weights[0]
    bed.drop(seq)
    wanted = _by_transformers(bed, "attentions", output_attentions=True)
    for mine, (exact, theirs) in zip(found, wanted, strict=True):
        _near(mine, exact, theirs)


def refused_weights(bed: Bed, reason: str) -> None:
    with bed.sequence() as seq:
        refused(bed, lambda: bed.run(seq, PROMPT, attention_weights=True), reason)


EXACT: dict[str, Callable[[Bed], None]] = {
    "generate": generate,
    "n samples of one prompt": samples,
    "stream and cancel": stream_and_cancel,
    "AsyncLLM": in_the_background,
    "beam search": beams,
    "structured outputs": structured,
    "logits processors": processors,
    "prompt logprobs": prompt_logprobs,
    "prefix cache": prefix,
    "preemption": preemption,
    "host memory": host_memory,
    "blending": blend,
    "Session.fork": fork,
    "Session.rewind": rewind,
    "Session.edit": edit,
    "Session.score": score,
    "Session.logits": logits,
    "Session.save and load_session": saved_and_loaded,
    "Session.kv": read_kv,
    "Session.set_kv": write_kv,
    "windowed sessions": window,
    "windowed sessions with a sink": sink,
    "token trees and commit": trees,
    "verify and rewind": verify,
    "masks": mask,
    "embeddings in place of tokens": embeddings,
    "hidden states": hidden_states,
    "attention weights": weights,
}
"""What tries each use where it works."""

REFUSED: dict[str, Callable[[Bed, str], None]] = {
    "blending": refused_blend,
    "masks": refused_mask,
    "attention weights": refused_weights,
    "windowed sessions": lambda bed, reason: refused(bed, lambda: bed.llm.session(PROMPT, window=9), reason),
    "windowed sessions with a sink": lambda bed, reason: refused(
        bed, lambda: bed.llm.session(PROMPT, window=9, sink=2), reason
    ),
}
"""What provokes each refusal."""
