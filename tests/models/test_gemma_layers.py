"""Gemma 3n and Gemma 4: what their configurations may ask for, against transformers; layers that
keep nothing; embeddings at placeholders; names.

``tests/test_parity.py`` runs them around the verbs of the state.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.exact import Float32Bound, run_exactly, run_transformers
from torch import Tensor

from quire import LLM
from quire.base.errors import CheckpointError, QuireError, Unsupported
from quire.base.types import Add, Chunk, Inputs, Step
from quire.contracts.ranks import Share
from quire.models.families import family_of
from quire.models.loading import load_model
from quire.weights.safetensors_files import SINGLE_FILE

from .conftest import Case, TinyCheckpoint, make_checkpoint

KINDS = ["sliding_attention", "full_attention"]
USUAL = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": KINDS * 2,
    "head_dim": 8,
    "sliding_window": 5,
    "vocab_size_per_layer_input": 90,
    "hidden_size_per_layer_input": 4,
}
ALTUP = {**USUAL, "altup_num_inputs": 3, "laurel_rank": 4, "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0]}
FULL = {**USUAL, "vocab_size_per_layer_input": 97, "global_head_dim": 16}
CASES = (
    Case("3n", "Gemma3n", ALTUP),
    Case(
        "3n-other",
        "Gemma3n",
        {
            **ALTUP,
            "num_kv_shared_layers": 0,
            "intermediate_size": [56, 40, 32, 56],
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
    ),
    Case("4", "Gemma4", {**FULL, "use_double_wide_mlp": True}),
    Case("4-whole", "Gemma4", {**FULL, "num_kv_shared_layers": 0, "tie_word_embeddings": False}),
    Case(
        "4-shared-values",
        "Gemma4",
        {
            **FULL,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
        },
    ),
)
TOKENS = [int(one) for one in torch.randint(0, 97, (19,), generator=torch.Generator().manual_seed(1))]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyCheckpoint]:
    path = tmp_path_factory.mktemp("gemma")
    return {case.name: make_checkpoint(case, path / case.name) for case in CASES}


@pytest.fixture(params=[case.name for case in CASES])
def tiny(request: pytest.FixtureRequest, made: dict[str, TinyCheckpoint]) -> TinyCheckpoint:
    return made[request.param]


def opened(path: Path, **options: Any) -> LLM:
    return LLM(path, **{"dtype": "float32", "page_size": 4, "kv_cache_memory": "4MiB", "device": "cpu", **options})


def run(llm: LLM, *parts: list[int], inputs: Inputs | None = None) -> Tensor:
    """Logits of all tokens of a new sequence, part by part."""
    runner, found = llm.engine.runner, []
    seq = runner.new_seq()
    runner.execute(Step(edits=(Add(seq),)))
    for part in parts:
        step = Step(chunks=(Chunk(seq, part, logits="all"),), inputs=inputs or Inputs())
        found.append(runner.execute(step).logits_RV.clone())
    return torch.cat(found)


def test_float32_logits_are_as_close_to_float64_as_those_of_transformers(tiny: TinyCheckpoint) -> None:
    tokens_T = torch.tensor(TOKENS)
    exact = run_exactly(tiny.model, tokens_T)
    bound = Float32Bound(tiny.model, tokens_T, exact)
    with opened(tiny.path) as llm:
        for parts in ([TOKENS], [TOKENS[:3], TOKENS[3:17], TOKENS[17:18], TOKENS[18:]]):
            assert float((run(llm, *parts) - exact).abs().max()) <= bound


@pytest.mark.parametrize("name", ["3n", "4"])
def test_half_precision_is_no_worse_than_in_transformers(made: dict[str, TinyCheckpoint], name: str) -> None:
    tiny = made[name]
    theirs = make_checkpoint(tiny.case, tiny.path.with_name(f"{name}-again")).model.to(torch.bfloat16)
    exact = run_exactly(theirs, torch.tensor(TOKENS))
    with opened(tiny.path, dtype="bfloat16") as llm:
        found = run(llm, TOKENS)
    errors = [
        float((one.double() - exact).square().mean().sqrt())
        for one in (found, run_transformers(theirs, torch.tensor(TOKENS)))
    ]
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.parametrize(("name", "columns"), [("3n", 2 * 8 + 2 * 8), ("4", 2 * 8 + 2 * 16)])
def test_layers_that_share_keep_nothing(made: dict[str, TinyCheckpoint], name: str, columns: int) -> None:
    """K and V of two layers of four, in memory, in reports and in the state's layers."""
    with opened(made[name].path) as llm:
        assert len(llm.model.blocks) == 4
        assert llm.engine.runner.state.geometry.layer_ids == (0, 1)
        assert llm.bytes_per_token == 2 * columns * 4
        with llm.session(TOKENS) as session:
            assert sorted(session.kv(1)) == ["k", "v"]
            with pytest.raises(QuireError, match="layer 2"):
                session.kv(2)


@pytest.mark.parametrize("name", ["3n", "4"])
def test_embeddings_at_placeholders(made: dict[str, TinyCheckpoint], name: str) -> None:
    """They have the inputs of layers that token 0 has, as in transformers."""
    tiny = made[name]
    text = tiny.model.model
    ids = torch.tensor([TOKENS])
    given = torch.randn(3, 32, generator=torch.Generator().manual_seed(3))
    embedded = text.embed_tokens(ids)
    embedded[0, 4:7] = given
    known = ids.clone()
    known[0, 4:7] = 0
    with torch.no_grad():
        own = text.get_per_layer_inputs(known)
        wanted = tiny.model(inputs_embeds=embedded, per_layer_inputs=own).logits[0]
    with opened(tiny.path) as llm:
        found = run(llm, [*TOKENS[:4], -1, -1, -1, *TOKENS[7:]], inputs=Inputs(embeddings=given))
    # Float32 through four blocks, whose sums transformers adds in other orders.
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_hidden_states_are_as_wide_as_the_model(made: dict[str, TinyCheckpoint]) -> None:
    with opened(made["3n"].path) as llm:
        runner = llm.engine.runner
        seq = runner.new_seq()
        step = Step((Add(seq),), (Chunk(seq, TOKENS, logits="all"),), Inputs(hidden_states=True, features=(1, 3)))
        output = runner.execute(step)
        assert {tuple(one.shape) for one in (*output.hidden_states[0], *output.features)} == {(19, 32)}


def test_published_files_have_k_and_v_of_layers_that_share(made: dict[str, TinyCheckpoint], tmp_path: Path) -> None:
    path = made["3n"].path
    tensors = load_file(path / SINGLE_FILE)
    more = {
        f"model.layers.3.self_attn.{name}.weight": torch.ones(1) for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    }
    save_file({**tensors, **more}, tmp_path / SINGLE_FILE)
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    assert load_model(tmp_path, dtype="float32").num_parameters == load_model(path, dtype="float32").num_parameters
    save_file({**tensors, "model.layers.1.self_attn.v_norm.weight": torch.ones(1)}, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=r"no place for model\.layers\.1"):
        load_model(tmp_path, dtype="float32")


def test_the_text_part_of_gemma_3n(made: dict[str, TinyCheckpoint], tmp_path: Path) -> None:
    path = made["3n"].path
    stored = load_file(path / SINGLE_FILE)
    tensors = {f"model.language_model.{name.removeprefix('model.')}": one for name, one in stored.items()}
    save_file({**tensors, "model.audio_tower.conv.weight": torch.ones(1)}, tmp_path / SINGLE_FILE)
    text = json.loads((path / "config.json").read_text())
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with opened(path) as one, opened(tmp_path) as other:
        assert torch.equal(run(one, TOKENS), run(other, TOKENS))


def config_of(made: dict[str, TinyCheckpoint], name: str, **changes: Any) -> Any:
    values = json.loads((made[name].path / "config.json").read_text()) | changes
    return family_of(values).read_config(values)


REFUSED: tuple[tuple[str, dict[str, Any], type[QuireError]], ...] = (
    ("3n", {"num_kv_shared_layers": 3}, CheckpointError),
    ("3n", {"num_kv_shared_layers": 5}, CheckpointError),
    ("3n", {"intermediate_size": [56, 56]}, CheckpointError),
    ("3n", {"activation_sparsity_pattern": [0.5, 1.0, 0, 0]}, CheckpointError),
    ("3n", {"altup_active_idx": 3}, CheckpointError),
    ("3n", {"attention_bias": True}, Unsupported),
    ("3n", {"hidden_activation": "relu"}, Unsupported),
    ("4", {"use_bidirectional_attention": "all"}, Unsupported),
    ("4", {"per_layer_config": {"1": {"intermediate_size": 3}}}, Unsupported),
    ("4", {"per_layer_config": {"1": {"num_key_value_heads": 3}}}, CheckpointError),
    ("4", {"per_layer_config": [1]}, CheckpointError),
    ("4", {"enable_moe_block": True, "top_k_experts": 3, "num_experts": 2}, CheckpointError),
)


@pytest.mark.parametrize(("name", "changes", "kind"), REFUSED, ids=lambda one: str(one)[:60])
def test_what_is_not_computed_is_refused_by_name(
    made: dict[str, TinyCheckpoint], name: str, changes: dict[str, Any], kind: type[QuireError]
) -> None:
    with pytest.raises(kind, match=r"config\.json"):
        config_of(made, name, **changes)


def test_what_decides_the_logits_is_in_the_canonical_form(made: dict[str, TinyCheckpoint]) -> None:
    for name, changes in (
        ("3n", {"num_kv_shared_layers": 0}),
        ("3n", {"altup_active_idx": 1}),
        ("3n", {"activation_sparsity_pattern": [0.0] * 4}),
        ("4", {"use_double_wide_mlp": False}),
        ("4", {"num_kv_shared_layers": 0}),
        ("4-shared-values", {"attention_k_eq_v": False}),
    ):
        assert config_of(made, name, **changes).canonical() != config_of(made, name).canonical(), changes


def test_inner_widths_that_do_not_divide_are_refused(made: dict[str, TinyCheckpoint]) -> None:
    config = config_of(
        made, "3n-other", num_attention_heads=12, num_key_value_heads=6, intermediate_size=[56, 40, 32, 54]
    )
    assert config.divided(Share(1, 2)).inner_sizes == (28, 20, 16, 27)
    with pytest.raises(
        Unsupported, match="tensor_parallel_size 4: 54 elements of intermediate_size do not divide by 4"
    ):
        config.divided(Share(0, 4))
