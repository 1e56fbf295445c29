"""Models whose layers slices divide, of every family: each session continues as a fresh run by
transformers would, whatever happened; state files are those of one process.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.engine.head_checkpoints import VOCAB, make_eagle, mtp_follower
from tests.engine.test_heads import Made, check_head, drafting, proposer_of
from tests.exact import Float32Bound, run_exactly
from tests.models import test_gemma_layers as gemma
from tests.models import test_recurrent_families as hybrids
from tests.models.conftest import Case, make_checkpoint
from tests.ranks.test_stages import MORE
from tests.ranks.thread_ranks import thread_ranks  # noqa: F401
from tests.sessions import test_family_conversations as families
from tests.sessions.test_conversations import run
from tests.small_llms import Checkpoint, MakeLLM, greedy, make_family, random_tokens
from tests.test_parity import FAMILIES

from quire import LLM
from quire.base.segments import BlendParams, Segment
from quire.branches.move_costs import MoveCosts

pytestmark = pytest.mark.usefixtures("thread_ranks")

QUICK = {"deepseek-v3", "mamba2", "falcon-h1", "gemma3n", "gemma4-moe", "lfm3", "olmo2", "qwen3-next", "qwen3.5"}
"""Latent rows, recurrent layers alone, beside and between attention, norms and cutoffs over what is
divided, experts, rows of another layer."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in sorted(FAMILIES)],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_family(request.param, tmp_path_factory.mktemp(request.param), **MORE.get(request.param, {}))


def in_ranks(make_llm: MakeLLM, slices: int, stages: int) -> MakeLLM:
    return partial(make_llm, tensor_parallel_size=slices, pipeline_parallel_size=stages)


def in_slices(make_llm: MakeLLM, **sizes: int) -> MakeLLM:
    return partial(make_llm, **{"tensor_parallel_size": 2, **sizes})


@pytest.mark.parametrize("case", gemma.CASES, ids=lambda case: case.name)
def test_logits_of_layers_that_share_rows(tmp_path: Path, case: Case) -> None:
    """The cutoffs of Gemma 3n are over the inner widths of both."""
    tiny = make_checkpoint(case, tmp_path)
    exact = run_exactly(tiny.model, torch.tensor(gemma.TOKENS))
    with gemma.opened(tiny.path, tensor_parallel_size=2) as llm:
        found = gemma.run(llm, gemma.TOKENS[:3], gemma.TOKENS[3:17], gemma.TOKENS[17:])
    assert float((found - exact).abs().max()) <= Float32Bound(tiny.model, torch.tensor(gemma.TOKENS), exact)


@pytest.mark.parametrize("name", ["mamba2", "bamba", "falcon-h1-normed", "granite-4-rope", "lfm2", "qwen3.5"])
def test_logits_of_mixers(tmp_path: Path, name: str) -> None:
    """Through this machine's calls for whole mixers, but for norms over the channels of both."""
    tiny = hybrids.make_checkpoint(hybrids.named(name), tmp_path)
    exact = run_exactly(tiny.model, torch.tensor(gemma.TOKENS))
    with gemma.opened(tiny.path, tensor_parallel_size=2) as llm:
        found = gemma.run(llm, gemma.TOKENS[:3], gemma.TOKENS[3:17], gemma.TOKENS[17:])
    assert float((found - exact).abs().max()) <= Float32Bound(tiny.model, torch.tensor(gemma.TOKENS), exact)


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)])
def test_all_ranks_take_the_factors_of_the_longest_sequence(tmp_path: Path, layout: tuple[int, int]) -> None:
    """The short ones, as transformers does in runs of this length."""
    (_, fields), (slices, stages) = FAMILIES["phimoe"], layout
    family = make_family("phimoe", tmp_path, rope_parameters=fields["rope_parameters"])
    exact = run_exactly(family.model, torch.tensor(gemma.TOKENS))
    options = {"max_model_len": 128, "tensor_parallel_size": slices, "pipeline_parallel_size": stages}
    with gemma.opened(family.path, **options) as llm:
        found = gemma.run(llm, gemma.TOKENS[:3], gemma.TOKENS[3:17], gemma.TOKENS[17:])
    assert float((found - exact).abs().max()) <= Float32Bound(family.model, torch.tensor(gemma.TOKENS), exact)


@pytest.mark.turns(2)
def test_conversations(make_llm: MakeLLM, family: Checkpoint, tmp_path: Path) -> None:
    run(in_slices(make_llm), family, 5, 16, tmp_path, **families.sizes(family, in_slices(make_llm)))


@pytest.mark.turns(8)
def test_conversations_with_a_history(make_llm: MakeLLM, family: Checkpoint, tmp_path: Path) -> None:
    """Over a store; pages are of another size than those of one process."""
    families.committed(in_slices(make_llm), family, 6, 12, tmp_path)


# -- one state, any layout -------------------------------------------------------------------------


def again(llm: LLM, source: Path, target: Path) -> list[int]:
    """Load a file, save it again, and return what follows."""
    with llm.load_session(source) as session:
        session.save(target)
        return session.generate(greedy(6)).outputs[0].token_ids


def check_files(one: LLM, other: LLM, folder: Path) -> None:
    """A file of either goes through the other and stays the same to the byte."""
    for number, (writer, reader) in enumerate(((one, other), (other, one))):
        first, second = (folder / f"{number}-{name}.kv" for name in ("first", "second"))
        with writer.session(random_tokens(40)) as session:
            session.generate(greedy(3))
            session.save(first)
            after = session.generate(greedy(6)).outputs[0].token_ids
        assert again(reader, first, second) == after
        assert second.read_bytes() == first.read_bytes()


def test_files_of_slices_are_those_of_one_process(make_llm: MakeLLM, family: Checkpoint, tmp_path: Path) -> None:
    check_files(make_llm(family, page_size=4), in_slices(make_llm)(family, page_size=8), tmp_path)


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 4}, {"pipeline_parallel_size": 2}], ids=("4", "2x2"))
@pytest.mark.parametrize("kind", ["falcon-h1", "qwen3.5"])
def test_files_of_four_ranks(make_llm: MakeLLM, kind: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """More slices than KV heads, groups of B and C, and key heads; and stages of slices."""
    fields = {"num_attention_heads": 4, "linear_num_value_heads": 8} if kind == "qwen3.5" else {}
    family = make_family(kind, tmp_path / kind, **fields)
    check_files(make_llm(family, page_size=4), in_slices(make_llm, **sizes)(family, page_size=8), tmp_path)


def test_layers_of_all_slices_are_read_and_written(make_llm: MakeLLM, family: Checkpoint, tmp_path: Path) -> None:
    """What one process has computed, and what was written over it, is equal to the bit on both."""
    one, two, path = make_llm(family), in_slices(make_llm)(family), tmp_path / "one.kv"
    with one.session(random_tokens(20)) as session:
        session.save(path)
    written: dict[int, dict[str, torch.Tensor]] = {}
    with one.load_session(path) as session:
        for layer in range(len(one.model.layer_specs)):
            tensors = {name: tensor for name, tensor in session.kv(layer).items() if name != "positions"}
            states = "state_0" in tensors
            written[layer] = {name: one.flip(-1) if states else one[3:5].flip(1) * 2 for name, one in tensors.items()}
    found = list[Any]()
    for llm in (one, two):
        with llm.load_session(path) as session:
            kept = session.fork()
            for layer, tensors in written.items():
                session.set_kv(layer, **({} if "state_0" in tensors else {"start": 7}), **tensors)
            # The file lacks the last token, which each has computed.
            rows = [
                state.kv(layer)[name][:-1]
                for state in (session, kept)
                for layer, name in kinds(written, "k", "v", "latent")
            ]
            rows += [session.kv(layer)[name] for layer, name in kinds(written, "state_0", "state_1")]
            found.append((rows, session.generate(greedy(6)).outputs[0].token_ids))
            for layer, name in kinds(written, "state_0"):
                assert not torch.equal(kept.kv(layer)[name], session.kv(layer)[name])
    assert found[0][1] == found[1][1]
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(found[0][0], found[1][0], strict=True))


def kinds(written: dict[int, dict[str, torch.Tensor]], *names: str) -> list[tuple[int, str]]:
    return [(layer, name) for layer, tensors in written.items() for name in names if name in tensors]


LAYOUTS = [(2, 1), (1, 2), (2, 2)]
"""Slices and stages."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["qwen3-next", "deepseek-v3"])
def test_a_head_of_the_model_drafts(make_llm: MakeLLM, kind: str, layout: tuple[int, int], tmp_path: Path) -> None:
    """It reads hidden states, which the last stage has on all its ranks, and is whole on rank 0:
    one that is right is always accepted."""
    mtp, after = mtp_follower(kind, tmp_path / "target")
    llm = drafting(in_ranks(make_llm, *layout), Made(mtp.target, "mtp", mtp.logits), depth=3)
    prompts = [random_tokens(length, seed=length) for length in (2, 40)]
    for prompt, output in zip(prompts, llm.generate(prompts, greedy(20)), strict=True):
        expected = [after[prompt[-1]]]
        while len(expected) < 20:
            expected.append(after[expected[-1]])
        assert output.outputs[0].token_ids == expected
        assert output.speculation is not None
        assert output.speculation.accepted == output.speculation.drafted > 0
    check_head(llm)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_without_logits_of_its_own_has_the_model_s(
    make_llm: MakeLLM, tied: bool, layout: tuple[int, int], tmp_path: Path
) -> None:
    """Ranks divide the model's rows, or the last stage has them, so rank 0 reads all of them for
    the head."""
    family = make_family("llama", tmp_path / "llama", tie_word_embeddings=tied)
    eagle = make_eagle(tmp_path / "eagle", (0, 1, 2), width=family.model.config.hidden_size, draft_vocab_size=VOCAB)
    (file,) = eagle.path.glob("*.safetensors")
    save_file({name: one for name, one in eagle.tensors.items() if name not in ("lm_head.weight", "d2t", "t2d")}, file)
    x_RE = torch.randn(7, family.model.config.hidden_size)
    logits, tokens = [], []
    for make in (make_llm, in_ranks(make_llm, *layout)):
        llm = drafting(make, Made(family, f"eagle:{eagle.path}", eagle.logits), depth=3)
        logits.append(proposer_of(llm).head.head(x_RE))
        tokens.append(llm.generate([random_tokens(20)], greedy(20))[0].outputs[0].token_ids)
    assert torch.equal(logits[0], logits[1])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("select", ["v", "v_or_question"])
def test_blended_latent_rows(
    make_llm: MakeLLM, select: Any, layout: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All slices have the rows, and choose those to compute by sums over all heads. The second
    stage leaves out what the first one does."""
    monkeypatch.setattr(MoveCosts, "is_worth", lambda *_: True)
    family, found = make_family("deepseek-v3", tmp_path), []
    pieces = [Segment(random_tokens(40, 1)), Segment(random_tokens(40, 2)), random_tokens(6, 3)]
    for make in (make_llm, in_ranks(make_llm, *layout)):
        llm = make(family, host_memory="16MiB")
        for gate in (False, True):
            llm.warm(pieces[:2], cache_salt=str(gate))
            params = BlendParams(ratio=0.3, least=1, gate=gate, select=select)
            (output,) = llm.generate([pieces], greedy(8), blend=params, cache_salt=str(gate))
            found.append((output.outputs[0].token_ids, output.blend))
    assert found[0][1] is not None
    assert found[0][1].blended > 0
    assert found[:2] == found[2:]
