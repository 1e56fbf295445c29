"""The benchmarks' groundwork, apart from time itself: made-up checkpoints, the peer, comparisons,
sizes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from quire.base.errors import FailedPrecondition, InvalidArgument, NotFound
from quire.contracts.layers import RopeSpec
from quire_bench import hardware
from quire_bench.checkpoints import LAG, SHAPES, Shape, after, checkpoint, make_weights, write_checkpoint
from quire_bench.peers import TransformersPeer
from quire_bench.reports import (
    Comparison,
    Spread,
    format_table,
    interleave,
    print_json,
    print_table,
    random_prompts,
)

QUICK = SHAPES["quick-1m"]
LLAMA3 = dataclasses.replace(QUICK, rope=dataclasses.replace(SHAPES["llama-3.2-1b"].rope, original_max_position=1024))
"""The quick shape with the scaled frequencies of the large one."""
QWEN3 = dataclasses.replace(QUICK, head_size=128, rope=RopeSpec(theta=1e6, rotary_dim=128), qk_norms=True)
"""The quick shape with norms of queries and keys; the heads together are wider than the model."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("quick-1m", directory=tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def peer(path: Path) -> TransformersPeer:
    return TransformersPeer(path)


def predicted(shape: Shape, prompt: list[int], steps: int) -> tuple[int, ...]:
    """The text as the checkpoints' docstring tells it, without a network."""
    successor, text = after(shape, seed=0).tolist(), list(prompt)
    for _ in range(steps):
        text.append(successor[text[-1 - LAG]])
    return tuple(text[len(prompt) :])


class TestCheckpoints:
    def test_shapes_are_those_of_the_models(self) -> None:
        """Sizes published with SmolLM2-135M, Qwen3-0.6B and Llama-3.2-1B."""
        assert SHAPES["smollm2-135m"].parameters == 134_515_008
        assert SHAPES["qwen3-0.6b"].parameters == 596_049_920
        assert SHAPES["llama-3.2-1b"].parameters == 1_235_814_400

    @pytest.mark.parametrize("name", SHAPES)
    def test_config_and_parameters_are_those_of_transformers(self, name: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = SHAPES[name].config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
        assert type(model).__name__ == config["architectures"][0]
        assert sum(p.numel() for p in model.parameters()) == SHAPES[name].parameters

    def test_tensors_are_complete_and_bfloat16(self, path: Path) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        weights = load_file(path / "model.safetensors")
        assert sum(w.numel() for w in weights.values()) == QUICK.parameters
        assert {w.dtype for w in weights.values()} == {torch.bfloat16}
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**json.loads((path / "config.json").read_text())))
        expected = {name: tensor.shape for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        assert {name: tensor.shape for name, tensor in weights.items()} == expected

    def test_cached_by_shape_and_seed(self, tmp_path: Path) -> None:
        first = checkpoint("quick-1m", directory=tmp_path)
        before = (first / "model.safetensors").stat().st_mtime_ns
        assert checkpoint("quick-1m", directory=tmp_path) == first
        assert (first / "model.safetensors").stat().st_mtime_ns == before
        assert checkpoint("quick-1m", directory=tmp_path, seed=1) != first
        assert len(list(tmp_path.iterdir())) == 2  # and nothing left over

    def test_losing_a_race_is_no_error(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = (path / "model.safetensors").stat().st_ino
        write_checkpoint(QUICK, path, seed=0)
        assert (path / "model.safetensors").stat().st_ino == before

    def test_same_seed_same_weights(self) -> None:
        one, two, other = make_weights(QUICK, seed=3), make_weights(QUICK, seed=3), make_weights(QUICK, seed=4)
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])

    def test_successors_are_one_cycle(self) -> None:
        successor, token, seen = after(QUICK, seed=0).tolist(), 0, set()
        while token not in seen:
            seen.add(token)
            token = successor[token]
        assert len(seen) == QUICK.vocab_size

    @pytest.mark.turns(4)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("shape", [QUICK, LLAMA3, QWEN3], ids=["default", "llama3", "qwen3"])
    def test_text_is_the_predicted_one_in_any_precision(self, shape: Shape, dtype: torch.dtype, tmp_path: Path) -> None:
        write_checkpoint(shape, tmp_path / "model", seed=0)
        peer = TransformersPeer(tmp_path / "model", dtype)
        prompts = random_prompts(3, LAG + 20, shape.vocab_size)
        made = peer.generate(prompts, 40)
        for prompt, tokens in zip(prompts.tolist(), made.tokens, strict=True):
            assert tokens == predicted(shape, prompt, 40)
            assert len(set(tokens)) > 30  # it does not settle

    def test_margin_exceeds_rounding_by_far(self, peer: TransformersPeer) -> None:
        """Also for prompts too short for the head to find its place."""
        for length in (1, 2, 5, LAG, LAG + 1, 300):
            best, second = peer.prefill(random_prompts(1, length, QUICK.vocab_size)).logits[0].float().topk(2).values
            assert best - second > 32 * torch.finfo(torch.bfloat16).eps * best, length

    def test_unknown_shape(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="smollm2-135m"):
            checkpoint("gpt-9", directory=tmp_path)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "change",
        [{"kv_heads": 3}, {"hidden_size": 20}, {"rope": RopeSpec(theta=1e4, rotary_dim=32)}],
        ids=lambda change: next(iter(change)),
    )
    def test_bad_shapes_are_refused(self, change: dict[str, Any]) -> None:
        with pytest.raises(InvalidArgument, match=r"must be|too small"):
            dataclasses.replace(QUICK, **change)


class TestPeer:
    def test_prefill_and_generate_agree(self, peer: TransformersPeer) -> None:
        prompts = random_prompts(2, 40, peer.vocab_size)
        prefill = peer.prefill(prompts)
        assert prefill.logits.shape == (2, peer.vocab_size)
        assert prefill.seconds > 0
        made = peer.generate(prompts, 3)
        assert [tokens[0] for tokens in made.tokens] == prefill.logits.argmax(-1).tolist()

    def test_one_time_for_each_token(self, peer: TransformersPeer) -> None:
        made = peer.decode(2, 30, 5)
        assert [len(tokens) for tokens in made.tokens] == [5, 5]
        assert len(made.decode_seconds) == 4
        assert min(made.prefill_seconds, *made.decode_seconds) > 0
        assert min(made.decode_seconds) <= made.seconds_per_token <= max(made.decode_seconds)
        assert peer.generate(random_prompts(2, 30, peer.vocab_size), 5).tokens == made.tokens
        assert peer.decode(2, 30, 5, seed=1).tokens != made.tokens

    def test_end_token_does_not_end_or_get_suppressed(self, peer: TransformersPeer) -> None:
        """The configuration's end token, 0, is an ordinary token of the cycle; a prompt is made
        that leads to it.
        """
        before_end = int((after(QUICK, seed=0) == 0).nonzero())
        prompt = random_prompts(1, 40, peer.vocab_size)
        prompt[0, -1 - LAG + 2] = before_end  # makes the third new token the end token
        made = peer.generate(prompt, 8).tokens[0]
        assert made[2] == 0
        assert made == predicted(QUICK, prompt[0].tolist(), 8)

    def test_one_token_has_no_decode_time(self, peer: TransformersPeer) -> None:
        made = peer.decode(1, 20, 1)
        assert made.decode_seconds == ()
        with pytest.raises(InvalidArgument, match="two steps"):
            _ = made.seconds_per_token

    @pytest.mark.parametrize(
        "prompts",
        [torch.zeros(3, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.int64), torch.zeros(1, 4)],
        ids=["vector", "empty", "float"],
    )
    def test_prompts_must_be_a_matrix_of_tokens(self, peer: TransformersPeer, prompts: torch.Tensor) -> None:
        for call in (peer.prefill, lambda p: peer.generate(p, 2)):
            with pytest.raises(InvalidArgument, match=r"\[B, S\]"):
                call(prompts)

    def test_out_of_range(self, peer: TransformersPeer) -> None:
        with pytest.raises(InvalidArgument, match=r"0\.\.1023"):
            peer.prefill(torch.tensor([[1024]]))
        with pytest.raises(InvalidArgument, match="steps"):
            peer.generate(torch.tensor([[5]]), 0)
        with pytest.raises(InvalidArgument, match="batch"):
            random_prompts(0, 4, 100)

    @given(st.integers(1, 4), st.integers(1, 50), st.integers(4, 1000))
    def test_random_prompts(self, batch: int, length: int, vocab: int) -> None:
        prompts = random_prompts(batch, length, vocab, seed=7)
        assert prompts.shape == (batch, length)
        assert 3 <= int(prompts.min()) <= int(prompts.max()) < vocab
        assert torch.equal(prompts, random_prompts(batch, length, vocab, seed=7))


class TestInterleave:
    def test_in_turn_with_ratios_inside_of_rounds(self) -> None:
        order: list[str] = []

        def says(name: str, seconds: list[float]) -> Callable[[], float]:
            times = itertools.chain([999.0], seconds)  # the first one is for warming up

            def function() -> float:
                order.append(name)
                return next(times)

            return function

        # The machine slows down fourfold; B takes twice as long as A in each round all the same.
        result = interleave({"a": says("a", [1.0, 2.0, 4.0]), "b": says("b", [2.0, 4.0, 8.0])}, 3)
        assert "".join(order) == "abababab"
        assert result.seconds == {"a": (1.0, 2.0, 4.0), "b": (2.0, 4.0, 8.0)}
        assert result.ratios == {
            "a": Spread(median=1.0, least=1.0, most=1.0),
            "b": Spread(median=2.0, least=2.0, most=2.0),
        }
        assert result.spread("a") == Spread(median=2.0, least=1.0, most=4.0)

    def test_none_takes_the_time_of_the_call(self) -> None:
        calls: list[int] = []
        result = interleave({"a": lambda: calls.append(1)}, 4, warmup=0)
        assert len(calls) == len(result.seconds["a"]) == 4
        assert min(result.seconds["a"]) > 0

    @pytest.mark.parametrize("said", [0.0, -1.0, float("nan"), "1", True])
    def test_nonsense_for_a_time_is_refused(self, said: Any) -> None:
        with pytest.raises(InvalidArgument, match="'a' must return"):
            interleave({"a": lambda: said}, 1)

    def test_nothing_to_do_is_refused(self) -> None:
        for functions, rounds, warmup in (({}, 1, 1), ({"a": lambda: None}, 0, 1), ({"a": lambda: None}, 1, -1)):
            with pytest.raises(InvalidArgument, match="at least one"):
                interleave(functions, rounds, warmup=warmup)


class TestPrinting:
    def test_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        rows = [{"case": "prefill", "ms": 12.34567, "n": 8}, {"case": "decode", "ms": 0.5, "note": "equal"}]
        assert format_table(rows).splitlines() == [
            "case        ms  n  note",
            "-------  -----  -  -----",
            "prefill  12.35  8",
            "decode     0.5     equal",
        ]
        print_table(rows)
        print_table([])
        assert capsys.readouterr().out == format_table(rows) + "\n"

    def test_json_is_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        spread = Spread(median=1.0, least=0.5, most=2.0)
        comparison = Comparison(seconds={"a": (1.0,)}, ratios={"a": spread})
        print_json({"comparison": comparison, "dtype": torch.bfloat16, "path": Path("x")})
        line = capsys.readouterr().out
        assert line.count("\n") == 1
        assert json.loads(line) == {
            "comparison": {"seconds": {"a": [1.0]}, "ratios": {"a": {"median": 1.0, "least": 0.5, "most": 2.0}}},
            "dtype": "torch.bfloat16",
            "path": "x",
        }
        with pytest.raises(InvalidArgument, match="Tensor"):
            print_json({"x": torch.zeros(1)})


class TestHardware:
    @pytest.mark.parametrize(
        ("text", "size"), [("480M", 480 << 20), ("2048K", 2 << 20), ("1G", 1 << 30), ("64", 64), ("", 0), ("x", 0)]
    )
    def test_parse_size(self, text: str, size: int) -> None:
        assert hardware.parse_size(text) == size

    def test_buffers_exceed_the_cache_where_memory_allows(self) -> None:
        gib = 1 << 30
        assert hardware.default_buffer_bytes(32 << 20, 64 * gib) == gib
        assert hardware.default_buffer_bytes(480 << 20, 64 * gib) == 4 * (480 << 20)
        assert hardware.default_buffer_bytes(480 << 20, 8 * gib) == gib
        assert hardware.default_buffer_bytes(0, 0) == gib

    def test_measure_reports_every_limit(self) -> None:
        threads = torch.get_num_threads()
        result = hardware.measure(threads=1, buffer_bytes=1 << 22, seconds=0.05)
        assert torch.get_num_threads() == threads
        assert result["threads"] == 1
        assert set(result) == set(hardware.Hardware.__annotations__)
        assert result["read_gbps"] == max(result["read_methods_gbps"].values()) > 0
        assert result["copy_gbps"] > 0
        assert {"gemv bfloat16", "packed float32", "max int32"} < set(result["read_methods_gbps"])
        packs = hardware.packs(torch.device("cpu"), torch.bfloat16)
        assert ("packed bfloat16" in result["read_methods_gbps"]) == packs
        for dtype in ("bfloat16", "float32", "int8"):
            assert result["peak_tflops"][dtype] == max(result["gemm_tflops"][dtype].values()) > 0
        assert result["exceeds_cache"] == (2 * result["cache_bytes"] <= 1 << 22)
        json.dumps(result)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_packed_product_is_the_product(self, dtype: torch.dtype) -> None:
        if not hardware.packs(torch.device("cpu"), dtype):
            pytest.skip(f"oneDNN packs no {dtype} on this processor")
        weight_OI, input_BI = torch.randint(-3, 4, (32, 64)).to(dtype), torch.randint(-1, 2, (3, 64)).to(dtype)
        assert torch.equal(hardware.packed_product(weight_OI, input_BI)(), input_BI @ weight_OI.t())

    def test_repeats_at_least_twice_after_warming_up(self) -> None:
        calls: list[str] = []
        hardware.best_seconds(lambda: calls.append("run"), budget=0.0, synchronize=lambda: calls.append("wait"))
        assert calls == ["run", "wait"] * 3

    def test_refusals(self) -> None:
        with pytest.raises(InvalidArgument, match="threads"):
            hardware.measure(threads=-1)
        with pytest.raises(FailedPrecondition, match="no-such-device"):
            hardware.measure(device="no-such-device")
