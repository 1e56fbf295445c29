"""Steps of the random machine over states with recurrent layers: those for attention, and more of
them.

Slots for states are few, so rings give way and forwards are refused, exactly when the oracle says
so.

Letters: T new tokens, N >= T rows of a padded tensor; Hq, H heads of queries and of a state; K, V
sizes of keys and values; C channels.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from torch import Tensor

from quire.base.errors import InvalidArgument, QuireError, Unsupported
from quire.contracts.layers import StateTensor
from quire.kv.contract import ContractState
from quire.kv.exchange import checksum

from .machine import BACKENDS, DTYPES, GEOMETRIES, IDS, PAGES
from .machine_exchange import ExchangeSteps, Opened
from .machine_forwards import Parents
from .oracle_exchange import Export
from .oracle_recurrent import HybridOracle
from .oracle_recurrent_forward import State
from .pair import num_columns
from .pair_hybrid import CHANNELS, HEADS, KEYS, MIXERS, RAW, TAPS, VALUES, HybridPair


class HybridSteps(ExchangeSteps):
    pair: HybridPair
    state: ContractState
    oracle: HybridOracle

    @initialize(
        page_size=st.sampled_from(sorted(PAGES)),
        geometry=st.sampled_from(sorted(GEOMETRIES)),
        mixers=st.sampled_from(sorted(MIXERS)),
        backend=st.sampled_from(sorted(BACKENDS)),
        dtype=st.sampled_from(DTYPES),
        rng=st.randoms(use_true_random=True),
    )
    def build(  # type: ignore[override]
        self, page_size: int, geometry: str, mixers: str, backend: str, dtype: torch.dtype, rng: random.Random
    ) -> None:
        self.specs, self.dtype = GEOMETRIES[geometry], dtype
        capacity = PAGES[page_size] * page_size
        self.pair = HybridPair(
            self.specs,
            MIXERS[mixers],
            num_states=rng.choice([5, 12, 30, 80]),
            ring=rng.choice([0, 1, 2, 4]),
            interval=page_size * rng.choice([0, 1, 2]),
            capacity=capacity,
            window_capacity=rng.choice([None, capacity * 2 // 3]),
            page_size=page_size,
            dtype=dtype,
            backend=backend,
            chunked=rng.random() < 0.5,
        )
        self.state, self.oracle = self.pair.state, self.pair.oracle
        self.dice = random.Random(rng.getrandbits(40))
        for seq_id in rng.sample(IDS, 4):
            self.call("add_sequence", seq_id)
            if rng.random() < 0.3:
                self.set_window(rng, seq_id)
        self.whole_forward(rng, *self.batch(rng))

    def begin(self, ids: list[int], counts: list[int], parents: Parents = None) -> bool:
        """Perhaps with states to keep on the way."""
        if self.dice.random() < 0.75:
            return super().begin(ids, counts, parents)
        chains = [parents is None or not any(isinstance(one, int) for one in parents)] * len(ids)
        if parents is not None:
            chains = [fits and entry < len(parents) and parents[entry] is None for entry, fits in enumerate(chains)]
        wishes = [
            sorted(self.dice.sample(range(1, max(2, count + 1)), 1)) if chain and self.dice.random() < 0.7 else []
            for chain, count in zip(chains, counts, strict=False)
        ]
        if self.dice.random() < 0.1 and wishes:
            wishes[-1] = self.dice.choice([[0], [counts[-1] + 1], [1, 1], [2, 1]])
        if not self.call("begin_forward", ids, counts, parents, checkpoints=wishes):
            return False
        self.compare_all()
        return True

    # -- recurrent layers in a forward -------------------------------------------------------------

    def end(self, skipped: list[int]) -> None:
        """Recurrent layers may set their states at any time before; mostly they do now."""
        if self.oracle.opened is not None and self.dice.random() < 0.9:
            mood = self.dice.choice(["run", "run", "run", "tokens", "any"])
            for layer in self.dice.sample(sorted(self.oracle.recurrent), len(self.oracle.recurrent)):
                self.mix(self.dice, layer, mood)
                if self.dice.random() < 0.1:
                    self.look(self.dice)
        super().end(skipped)

    def mix(self, rng: random.Random, layer: int, mood: str) -> None:
        """One recurrent layer as models run it, or its states set from outside, or some of them
        left as they are.
        """
        self.bring(rng, layer)
        for index, one in enumerate(self.oracle.recurrent[layer].states):
            if mood == "any" and rng.random() < 0.3:
                continue
            if mood == "tokens" or one in RAW.states or rng.random() < 0.1:
                self.put(rng, layer, index, per_token=mood == "tokens" or rng.random() < 0.6)
            elif len(one.shape) == 2:
                self.convolve(rng, layer, index)
            else:
                self.recur(rng, layer, index)

    def state_values(self, rng: random.Random, one: StateTensor, *lead: int) -> Tensor:
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        return (torch.randn(*lead, *one.shape, generator=generator) * 8).to(getattr(torch, one.dtype))

    def put(self, rng: random.Random, layer: int, index: int, *, per_token: bool) -> None:
        forward = self.oracle.forward
        rows = 2 if forward is None else forward.tokens if per_token else len(forward.entries)
        data = self.state_values(rng, self.oracle.recurrent[layer].states[index], rows + (rng.random() < 0.03))
        self.compute(
            "set",
            lambda: self.oracle.set(layer, index, data, per_token),
            lambda: self.state.set(layer, index, data, per_token=per_token),
        )

    def convolve(self, rng: random.Random, layer: int, index: int) -> None:
        dtype = getattr(torch, self.oracle.recurrent[layer].states[index].dtype)
        x, weight, bias = (
            self.values(rng, *shape).to(dtype) for shape in ((self.tokens(), CHANNELS), (CHANNELS, TAPS), (CHANNELS,))
        )
        found = self.compute(
            "convolve",
            lambda: self.oracle.convolve(layer, index, x, weight.double(), bias.double()),
            lambda: self.state.open_pass().convolve(layer, index, x, weight, bias),  # type: ignore[attr-defined]
        )
        self.check_outs(found, self.tokens())

    def recur(self, rng: random.Random, layer: int, index: int) -> None:
        dtype = getattr(torch, self.oracle.recurrent[layer].states[index].dtype)
        verb = dtype is torch.float32
        tokens, group = self.tokens(), rng.choice([1, 2, 3])
        rows = tokens + (rng.choice([0, 0, 1, 4]) if verb else 0)
        q, k, v = (
            self.values(rng, rows, heads, size).to(dtype)
            for heads, size in ((HEADS * group, KEYS), (HEADS, KEYS), (HEADS, VALUES))
        )
        k = k / k.norm(dim=-1, keepdim=True).clamp_min(1e-3)
        decay = rng.choice([None, (rows, HEADS), (rows, HEADS, KEYS)])
        log_decay = None if decay is None else -self.values(rng, *decay).abs().to(dtype)
        beta = self.values(rng, rows, HEADS).to(dtype).sigmoid() if rng.random() < 0.6 else None
        scale = rng.choice([1.0, 0.3])
        out = torch.full((rows, HEADS * group, VALUES), 7.0) if verb and rng.random() < 0.3 else None

        def act() -> Tensor:
            if verb:
                return self.state.linear_attention(
                    layer, q, k, v, sm_scale=scale, log_decay=log_decay, beta=beta, out=out
                )
            opened: Any = self.state.open_pass()
            return opened.linear_attention(layer, index, q, k, v, scale=scale, log_decay=log_decay, beta_TH=beta)

        found = self.compute(
            "linear_attention", lambda: self.oracle.recur(layer, index, q, k, v, scale, log_decay, beta), act
        )
        self.check_outs(found, tokens)
        if found and verb:
            assert (found[1][tokens:] == (0.0 if out is None else 7.0)).all()
            assert out is None or found[1] is out

    def check_outs(self, found: tuple[Any, Any] | None, tokens: int) -> None:
        if found:
            assert len(found[0]) == tokens
            for row, (right, bound) in enumerate(found[0]):
                error = float((found[1][row].double() - right).abs().max())
                assert error <= bound, f"row {row}: error {error}, bound {bound}"

    @rule(rng=st.randoms(use_true_random=True))
    def mixer(self, rng: random.Random) -> None:
        self.ensure_open(rng)
        layer = rng.choice(sorted(self.oracle.recurrent))
        if rng.random() < 0.2:
            self.refused_mixer(rng, layer)
        else:
            self.mix(rng, layer, rng.choice(["run", "tokens", "any"]))

    @rule(rng=st.randoms(use_true_random=True))
    def look(self, rng: random.Random) -> None:
        """The states before this forward, also after they were set in it."""
        self.ensure_open(rng)
        (layer, index), per_token = rng.choice(self.oracle.members), rng.random() < 0.6
        if rng.random() < 0.1:
            index = 5
        found = self.compute(
            "get",
            lambda: self.oracle.get(layer, index, per_token),
            lambda: self.state.get(layer, index, per_token=per_token),
        )
        if found:
            assert len(found[0]) == len(found[1])
            for before, got in zip(*found, strict=True):
                if before is None:
                    assert not got.any()
                else:
                    before.check((layer, index), got)

    def refused_mixer(self, rng: random.Random, layer: int) -> None:
        tokens = self.tokens()
        one = self.oracle.recurrent[layer].states[0]
        data = self.state_values(rng, one, tokens)
        q, k, v = self.values(rng, tokens, 2, 3), self.values(rng, tokens, 2, 3), self.values(rng, tokens, 2, 2)
        q, k, v = q.float(), k.float(), v.float()
        wrong: list[tuple[type[QuireError], str, tuple[Any, ...], dict[str, Any]]] = [
            (InvalidArgument, "set", (9, 0, data), {"per_token": True}),
            (InvalidArgument, "set", (layer, 9, data), {"per_token": True}),
            (Unsupported, "set", (0, 0, data), {"per_token": True}),
            (Unsupported, "get", (1, 0), {}),
            (Unsupported, "linear_attention", (0, q, k, v), {}),
            (Unsupported, "append_kv", (layer, k, v), {}),
            (Unsupported, "cross_attention", (layer, q), {}),
        ]
        wrong += [(Unsupported, "debug_get_kv", (seq_id,), {"layer": layer}) for seq_id in self.oracle.sequences]
        if one.dtype == "float32" and len(one.shape) == 3:
            wrong += [
                (InvalidArgument, "linear_attention", (layer, q[..., :-1], k, v), {}),
                (InvalidArgument, "linear_attention", (layer, q, k, v[:-1]), {}),
                (InvalidArgument, "linear_attention", (layer, q, k, v), {"beta": torch.ones(tokens, 3)}),
            ]
        if self.oracle.forward is not None:
            wrong += [
                (InvalidArgument, "set", (layer, 0, data[:, :-1]), {"per_token": True}),
                (InvalidArgument, "set", (layer, 0, data.to(torch.int16)), {"per_token": True}),
                (InvalidArgument, "set", (layer, 0, data[:-1]), {"per_token": True}),
                (InvalidArgument, "get", (layer, 0), {"out": data[..., :-1]}),
            ]
            if one.dtype == "float32" and len(one.shape) == 3:
                more_than_one = {"log_decay": torch.ones(tokens, HEADS)}
                wrong.append((InvalidArgument, "linear_attention", (layer, q, k, v), more_than_one))
        kind, verb, args, more = rng.choice(wrong)
        self.fail(verb, kind, lambda: getattr(self.state, verb)(*args, **more))

    # -- kept states -------------------------------------------------------------------------------

    def settled_id(self, rng: random.Random) -> int:
        self.settle(rng)
        seq_id = self.any_id(rng)
        if self.oracle._pending(seq_id) and rng.random() < 0.8:
            self.commit_some(rng, [seq_id])
        return seq_id

    @rule(rng=st.randoms(use_true_random=True))
    def keep(self, rng: random.Random) -> None:
        self.call("checkpoint", self.settled_id(rng))

    @rule(rng=st.randoms(use_true_random=True))
    def give_up(self, rng: random.Random) -> None:
        seq_id = self.settled_id(rng)
        kept = sorted(self.oracle.parts[seq_id].kept) if seq_id in self.oracle.parts else []
        many = len(kept) > 2 and rng.random() < 0.4
        for position in kept if many else [rng.choice([*kept, *kept, rng.randint(-1, 9)])]:
            self.call("drop_checkpoint", seq_id, position)
        self.compare_all()

    @rule(rng=st.randoms(use_true_random=True))
    def overwrite(self, rng: random.Random) -> None:
        seq_id, (layer, index) = self.settled_id(rng), rng.choice(self.oracle.members)
        data = self.state_values(rng, self.oracle.recurrent[layer].states[index])
        if rng.random() < 0.1:
            layer = rng.choice([0, 9])
        if self.call("debug_set", layer, index, seq_id, data):
            self.compare_all()

    @rule(rng=st.randoms(use_true_random=True))
    def peek(self, rng: random.Random) -> None:
        seq_id, (layer, index) = self.any_id(rng), rng.choice(self.oracle.members)
        if rng.random() < 0.1:
            layer, index = rng.choice([(0, 0), (9, 0), (layer, 9)])
        kept = self.oracle.kept_positions(seq_id) if seq_id in self.oracle.parts else [0]
        position = rng.choice([None, *kept, rng.randint(-1, 12)])
        found = self.compute(
            "debug_get",
            lambda: self.oracle.debug_get(layer, index, seq_id, position),
            lambda: self.state.debug_get(layer, index, seq_id, position=position),
        )
        if found:
            found[0].check((layer, index), found[1])

    def refused_attention(self, rng: random.Random, layer: int) -> None:
        spec, rows = self.specs[layer], self.num_rows(rng)
        qkv = self.values(rng, rows, num_columns(spec))
        fused = "attention_with_fused_qkv"
        mixer = rng.choice(sorted(self.oracle.recurrent))
        wrong: list[tuple[type[QuireError], Callable[[], Any]]] = [
            (InvalidArgument, lambda: self.state.attention_with_fused_qkv(layer, qkv[:, :-1])),
            (InvalidArgument, lambda: self.state.attention_with_fused_qkv(9, qkv)),
            (Unsupported, lambda: self.state.attention_with_fused_qkv(mixer, qkv)),
            (Unsupported, lambda: self.state.append_mla_kv(layer, qkv)),
        ]
        kind, act = rng.choice(wrong)
        self.fail(fused, kind, act)

    # -- exchange ----------------------------------------------------------------------------------

    @rule(rng=st.randoms(use_true_random=True))
    def export(self, rng: random.Random) -> None:
        """Out of the state, into another with another page size, and out of that again."""
        seq_id = self.any_id(rng)
        if self.oracle.forward is None and self.oracle._pending(seq_id) and rng.random() < 0.7:
            self.commit_some(rng, [seq_id])
        found = self.compute(
            "get_checkpoint_metadata",
            lambda: self.oracle.export(seq_id),
            lambda: self.state.get_checkpoint_metadata(seq_id),
        )
        if not found:
            return
        told, metadata = found
        expected = told.metadata(self.oracle.classes)
        assert {name: metadata[name] for name in expected} == expected
        kept = sorted(self.oracle.parts[seq_id].kept)
        assert metadata["kept_recurrent_positions"] == kept
        groups = [self.state.export_page_group(seq_id, group["group"]) for group in metadata["groups"]]
        assert len(groups) == len(self.specs) + len(self.pair.recurrent)
        page_size = rng.choice([1, 3, 7, 16])
        other = HybridPair(
            self.specs,
            self.pair.recurrent,
            num_states=1 + len(kept),
            ring=rng.choice([0, 3]),
            interval=page_size * rng.choice([0, 1]),
            capacity=1 + metadata["length"],
            page_size=page_size,
            dtype=self.dtype,
        )
        other.state.prepare_import(5, metadata)
        other.oracle.prepare_import(5, Export.read(metadata), kept=kept)
        for layer in reversed(range(len(groups))):
            other.state.import_page_group(5, layer, groups[layer])
            if layer in self.oracle.recurrent:
                other.oracle.import_states(5, layer, groups[layer], fits=True, intact=True)
            else:
                other.oracle.import_group(5, layer, groups[layer]["k"], groups[layer]["v"])
        other.state.finish_import(5)
        other.oracle.finish_import(5)
        for layer, index in self.oracle.members:
            for position in (None, *kept):
                suffix = "" if position is None else f"@{position}"
                shown = self.oracle.shown_at(seq_id, position)
                assert isinstance(shown, State)
                shown.check((layer, index), groups[layer][f"state.{index}{suffix}"])
        other.compare()
        assert other.state.get_checkpoint_metadata(5) == metadata
        assert other.state.get_layout_hash() == self.state.get_layout_hash() == metadata["layout_hash"]
        self.exports = [*self.exports[-3:], (metadata, groups)]

    def bring_layer(self, rng: random.Random, seq_id: int, layer: int) -> None:
        """A group that is still missing, or one too many, or another one's, or damaged."""
        if layer not in self.oracle.recurrent:
            super().bring_layer(rng, seq_id, layer)
            return
        source, groups = self.sources.get(seq_id, rng.choice(self.exports))
        group = dict(rng.choice(self.exports)[1][layer] if rng.random() < 0.1 else groups[layer])
        summed = self.is_summed(seq_id)
        damaged = rng.choice(sorted(group))
        if rng.random() < 0.2 and group[damaged].numel() and summed:
            group[damaged] = group[damaged].clone()
            group[damaged].view(torch.uint8).view(-1)[0] ^= 1
        promised = source["groups"][layer]["tensors"] if summed else {}

        def expect() -> None:
            kept = self.oracle.parts[seq_id].kept if seq_id in self.oracle.parts else {}
            names = [f"state.{index}" for index in range(len(self.oracle.recurrent[layer].states))]
            fits = set(group) == {name + suffix for name in names for suffix in ("", *(f"@{p}" for p in kept))}
            intact = not fits or all(checksum(group[name]) == promised[name]["checksum"] for name in promised)
            self.oracle.import_states(seq_id, layer, group, fits=fits, intact=intact)

        self.compute("import_page_group", expect, lambda: self.state.import_page_group(seq_id, layer, group))
        if rng.random() < 0.1:
            self.fail("import_rows", Unsupported, lambda: self.state.import_rows(seq_id, layer, 0, group))

    def frozen(self, seq_id: int) -> list[Any]:
        part = self.oracle.parts[seq_id]
        return [*super().frozen(seq_id), id(part.present), {p: id(one) for p, one in part.kept.items()}]

    def read(self, rng: random.Random, one: Opened) -> None:
        super().read(rng, one)
        part = self.oracle.parts[one.seq_id]
        found = part.kept | {one.told.length: part.present}
        assert one.given.positions == sorted(found)
        for layer, spec in self.oracle.recurrent.items():
            for position, right in found.items():
                states = one.given.states(layer, position)
                assert list(states) == [f"state.{index}" for index in range(len(spec.states))]
                for index, tensor in enumerate(states.values()):
                    right.check((layer, index), tensor)
