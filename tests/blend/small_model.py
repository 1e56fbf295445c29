"""A small random decoder in plain torch, with the loop over layers that blending asks for.

It shares tables and ``rotate`` with the runtime, and nothing else. Whatever the machine's default,
it runs in the dtype of the mode ``tests.exact.Float64``.

Letters: T rows of a batch; n tokens of a prompt, C of them context; S rows that run; H heads; D
head size; E width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.blend_inputs import BlendedRows
from quire.blend.executor import TensorBlender
from quire.blend.scores import SCORES, ScoreInputs
from quire.contracts.blend import BlendOutput
from quire.contracts.layers import FullAttention, LatentAttention, LayerSpec, RopeSpec, WindowedAttention
from quire.ops.rope import RotaryTable, rotate, rotate_last


class Distance:
    """A score of a caller's own: the squared distance of fresh and cached rows."""

    def __init__(self, *names: str) -> None:
        self.needs = frozenset(names)

    def scores(self, inputs: ScoreInputs) -> Tensor:
        found = inputs.fresh_v.new_zeros(len(inputs.candidates))
        pairs = {"k": (inputs.fresh_k, inputs.cached_k), "v": (inputs.fresh_v, inputs.cached_v)}
        for name in self.needs:
            fresh, cached = pairs[name]
            assert cached is not None
            found += (fresh - cached)[inputs.candidates].square().flatten(1).sum(-1)
        return inputs.over_ranks(found)


for _name in ("k", "kv"):
    if _name not in SCORES:
        SCORES.register(_name, Distance(*_name))

VOCABULARY = 40
WIDTH = 16
LAYERS = 4
Mask = Callable[[Tensor, int, int | None], Tensor]
"""From positions of queries ``[S]``, the number of keys n and the window: what each may see, bool
``[S, n]``."""


def by_position(places_S: Tensor, count: int, window: int | None) -> Tensor:
    """Let a query at p see keys at positions p - window + 1 to p."""
    gap = places_S[:, None] - torch.arange(count)
    return (gap >= 0) & (gap < (window or count + 1))


def bottom_right(places_S: Tensor, count: int, window: int | None) -> Tensor:
    """Align the triangle of S queries at the last of n keys, as causal kernels do."""
    return by_position(torch.arange(count - len(places_S), count), count, window)


def rope(**given: object) -> RopeSpec:
    return RopeSpec(**{"theta": 100.0, "rotary_dim": 8, **given})  # type: ignore[arg-type]


def heads(number: int, kv: int, spec: RopeSpec | None, window: int | None = None) -> FullAttention | WindowedAttention:
    given = {
        "num_heads": number,
        "num_kv_heads": kv,
        "head_dim": 8,
        "value_dim": 8,
        "rope": spec,
        "rope_mode": "none" if spec is None else "normal",
    }
    return FullAttention(**given) if window is None else WindowedAttention(**given, window=window)  # type: ignore[arg-type]


LATENT = LatentAttention(num_heads=4, row_dim=12, value_dim=8, rope=rope(rotary_dim=4, interleaved=True))
YARN = rope(scaling="yarn", factor=4.0, original_max_position=32, attention_factor=1.3)
LONG = rope(scaling="longrope", factors=(1.0, 2.0, 3.0, 5.0), attention_factor=1.2)
KINDS: dict[str, tuple[LayerSpec, ...]] = {
    "gqa": (heads(4, 2, rope()),) * LAYERS,
    "mha": (heads(3, 3, rope()),) * LAYERS,
    "mqa": (heads(4, 1, rope()),) * LAYERS,
    "qk_norm": (heads(4, 2, rope()),) * LAYERS,
    "window": (heads(4, 2, rope(), 5), heads(4, 2, rope())) * 2,
    "bases": (heads(4, 2, rope(theta=10.0), 6), heads(4, 2, rope(theta=1e4))) * 2,
    "yarn": (heads(4, 2, YARN),) * LAYERS,
    "longrope": (heads(4, 2, LONG),) * LAYERS,
    "partial": (heads(4, 2, rope(rotary_dim=4)),) * LAYERS,
    "interleaved": (heads(4, 2, rope(interleaved=True)),) * LAYERS,
    "without": (heads(4, 2, rope()), heads(4, 2, None)) * 2,
    "latent": (LATENT,) * LAYERS,
}
"""Kinds of models by name."""


@dataclass
class Trace:
    """One prompt, run in full."""

    k: list[Tensor]
    """Per layer ``[n, H, D]``, rotated."""
    raw_k: list[Tensor]
    """As ``k``, before its rotation."""
    v: list[Tensor]
    logits: Tensor
    """``[n, vocabulary]``"""


class SmallModel:
    """Weights of one kind, drawn with a seed."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.kind = kind
        self.specs = KINDS[kind]
        self._tables: dict[RopeSpec, RotaryTable] = {}
        draw = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=draw, dtype=torch.float64) * columns**-0.5

        self._embedding = weight(VOCABULARY, WIDTH) * WIDTH**0.5
        self._head = weight(VOCABULARY, WIDTH)
        self._layers = []
        for spec in self.specs:
            assert isinstance(spec, (FullAttention, WindowedAttention, LatentAttention))
            columns = spec.head_dim * spec.num_heads
            kv = spec.row_dim if isinstance(spec, LatentAttention) else 2 * spec.num_kv_heads * spec.head_dim
            self._layers.append(
                {
                    "qkv": weight(columns + kv, WIDTH) * 1.5,
                    "out": weight(WIDTH, spec.num_heads * spec.value_dim),
                    "up": weight(2 * WIDTH, WIDTH),
                    "down": weight(WIDTH, 2 * WIDTH),
                }
            )

    @property
    def shapes(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Heads and columns of a row of K and of V, by layer."""
        return [((1, 4), (1, 8)) if self.kind == "latent" else ((one.num_kv_heads, 8),) * 2 for one in self.specs]  # type: ignore[union-attr]

    def embed(self, tokens_T: Tensor) -> Tensor:
        return self._embedding[tokens_T]

    def head(self, x_TE: Tensor) -> Tensor:
        return _normed(x_TE) @ self._head.T

    def turned(self, layer_id: int, x_THD: Tensor, places_T: Tensor) -> Tensor:
        """Rotate K, or Q, by the table of the layer; of a latent layer's Q the last columns."""
        spec = self.specs[layer_id].rope  # type: ignore[union-attr]
        if spec is None:
            return x_THD
        if spec not in self._tables:
            self._tables[spec] = RotaryTable(spec, torch.device("cpu"))
        cos, sin = self._tables[spec].rows(places_T, int(places_T.max()))
        return (
            rotate_last(x_THD, cos, sin, interleaved=spec.interleaved)
            if self.kind == "latent"
            else rotate(x_THD, cos, sin, interleaved=spec.interleaved)
        )

    def project(self, layer_id: int, x_TE: Tensor, places_T: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, raw k, v, each ``[T, H, D]``."""
        spec = self.specs[layer_id]
        qkv = _normed(x_TE) @ self._layers[layer_id]["qkv"].T
        if isinstance(spec, LatentAttention):
            q, v, k = qkv.split([spec.num_heads * 12, 8, 4], -1)
            kv_heads = 1
        else:
            assert isinstance(spec, (FullAttention, WindowedAttention))
            kv_heads = spec.num_kv_heads
            q, k, v = qkv.split([spec.num_heads * 8, kv_heads * 8, kv_heads * 8], -1)
        q, k, v = (x.reshape(len(x), count, -1) for x, count in ((q, spec.num_heads), (k, kv_heads), (v, kv_heads)))
        if self.kind == "qk_norm":
            q, k = _normed(q), _normed(k) * 1.5
        return self.turned(layer_id, q, places_T), self.turned(layer_id, k, places_T), k, v

    def attend(self, layer_id: int, q_SHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, seen_SN: Tensor) -> Tensor:
        """Return ``[S, H * D]``."""
        spec = self.specs[layer_id]
        assert isinstance(spec, (FullAttention, WindowedAttention, LatentAttention))
        if isinstance(spec, LatentAttention):
            k_NHD = torch.cat((v_NHD, k_NHD), -1)
        group = q_SHD.shape[1] // k_NHD.shape[1]
        k_NHD, v_NHD = (x.repeat_interleave(group, 1) for x in (k_NHD, v_NHD))
        logits = torch.einsum("shd,nhd->hsn", q_SHD, k_NHD) * spec.scale
        weights = logits.masked_fill(~seen_SN, -torch.inf).softmax(-1)
        return torch.einsum("hsn,nhd->shd", weights, v_NHD).flatten(1)

    def finish(self, layer_id: int, x_SE: Tensor, attended_SC: Tensor) -> Tensor:
        weights = self._layers[layer_id]
        x_SE = x_SE + attended_SC @ weights["out"].T
        return x_SE + (_normed(x_SE) @ weights["up"].T).relu() @ weights["down"].T

    def window(self, layer_id: int) -> int | None:
        return self.specs[layer_id].layer_window  # type: ignore[union-attr]

    def full(self, tokens: Sequence[int] | Tensor, start: int = 0) -> Trace:
        """Run a prompt whose first token stands at ``start``, in full."""
        x = self.embed(torch.as_tensor(tokens))
        places = torch.arange(len(x))
        trace = Trace([], [], [], x)
        for layer_id in range(LAYERS):
            q, k, raw, v = self.project(layer_id, x, places + start)
            seen = by_position(places, len(x), self.window(layer_id))
            x = self.finish(layer_id, x, self.attend(layer_id, q, k, v, seen))
            trace.k.append(k)
            trace.raw_k.append(raw)
            trace.v.append(v)
        trace.logits = self.head(x)
        return trace

    def past_of(self, tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the true K and V of each layer."""
        trace = self.full(tokens)
        return list(zip(trace.k, trace.v, strict=True))

    def moved_cache(self, trace: Trace, origins: NDArray[np.int64], first: int) -> list[tuple[Tensor, Tensor]]:
        """Return K and V of rows from ``first`` on, as if they had been stored at ``origins``."""
        at = torch.from_numpy(origins)
        return [
            (self.turned(layer_id, raw[first:], at), v[first:].clone())
            for layer_id, (raw, v) in enumerate(zip(trace.raw_k, trace.v, strict=True))
        ]


@cache
def small_model(kind: str) -> SmallModel:
    return SmallModel(kind)


def _normed(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@dataclass
class Prompt:
    """One request of a batch. Arrays and tensors are of its rows C..n - 1."""

    tokens: list[int]
    cached: list[tuple[Tensor, Tensor]]
    """K and V of each layer ``[n - C, H, D]``."""
    valid: NDArray[np.bool_]
    origins: NDArray[np.int64]
    context: int = 0
    """C"""
    past: list[tuple[Tensor, Tensor]] | None = None
    """K and V of each layer ``[C, H, D]``; None: the true ones."""
    known: BlendedRows | None = None

    @property
    def count(self) -> int:
        return len(self.tokens) - self.context


@dataclass
class Answer:
    """What came of one request."""

    rows: list[int]
    """Positions of the rows that ran to the end."""
    logits: Tensor
    """``[S, vocabulary]``, of these rows."""
    k: list[Tensor] = field(default_factory=list)
    """Per layer ``[n, H, D]``: what attention read, the context's included."""
    v: list[Tensor] = field(default_factory=list)
    hidden: list[dict[int, Tensor]] = field(default_factory=list)
    """Per layer the residual stream behind it, by position."""


def run(
    model: SmallModel,
    blender: TensorBlender,
    prompts: Sequence[Prompt],
    *,
    mask: Mask = by_position,
    form: Callable[[Tensor], Tensor] = lambda rows: rows,
    token_dim: int = 0,
    watch: Callable[[int, BlendOutput], object] = lambda layer_id, out: None,
    retrieve_from: int | None = None,
    stop: int = LAYERS,
) -> list[Answer]:
    """Run one blended forward of a batch: the loop of the specification.

    ``form`` maps ``[T, H, D]`` to what the executor gets, and ``token_dim`` says where tokens are
    then. ``retrieve_from``: the first layer with cached rows; None: the check layer. ``stop``:
    give up before this layer."""
    counts = [prompt.count for prompt in prompts]
    starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    ids = torch.tensor([token for prompt in prompts for token in prompt.tokens[prompt.context :]])
    places = torch.cat([torch.arange(one.context, len(one.tokens)) for one in prompts])
    valid = torch.from_numpy(np.concatenate([one.valid for one in prompts])).int()
    origins = torch.from_numpy(np.concatenate([one.origins for one in prompts]))
    past = [one.past if one.past or not one.context else model.past_of(one.tokens[: one.context]) for one in prompts]
    first = blender.policy.layers[0] if retrieve_from is None else retrieve_from
    answers = [Answer([], ids) for _ in prompts]
    blender.prepare([one.known for one in prompts])
    x, bounds = model.embed(ids), starts.tolist()
    alive, owner = np.arange(len(ids)), np.repeat(np.arange(len(prompts)), counts)
    for layer_id in range(stop):
        q, k, _, v = model.project(layer_id, x, places)
        shapes = q.shape[1:], k.shape[1:], v.shape[1:]
        cached_k = cached_v = None
        if layer_id >= first and valid.any():
            cached_k = form(torch.cat([one.cached[layer_id][0] for one in prompts]))
            cached_v = form(torch.cat([one.cached[layer_id][1] for one in prompts]))
        out = blender.blend(
            layer_id, cached_k, cached_v, valid, origins, form(q), form(k), form(v), places, starts, token_dim
        )
        watch(layer_id, out)
        x, places, alive = x[out.kept], out.positions, alive[out.kept.numpy()]
        assert out.local_indices.tolist() == alive.tolist()
        q, k, v = (
            rows.movedim(token_dim, 0).reshape(-1, *shape)
            for rows, shape in zip((out.q, out.k, out.v), shapes, strict=True)
        )
        attended = []
        for request, (answer, before) in enumerate(zip(answers, past, strict=True)):
            rows = slice(bounds[request], bounds[request + 1])
            own = torch.from_numpy(owner[alive] == request)
            keys, values = k[rows], v[rows]
            if before is not None:
                keys, values = torch.cat((before[layer_id][0], keys)), torch.cat((before[layer_id][1], values))
            seen = mask(places[own], len(keys), model.window(layer_id))
            attended.append(model.attend(layer_id, q[own], keys, values, seen))
            answer.k.append(keys)
            answer.v.append(values)
        x = model.finish(layer_id, x, torch.cat(attended))
        for request, answer in enumerate(answers):
            own = torch.from_numpy(owner[alive] == request)
            answer.hidden.append(dict(zip(places[own].tolist(), x[own], strict=True)))
    for request, answer in enumerate(answers):
        own = torch.from_numpy(owner[alive] == request)
        answer.rows, answer.logits = places[own].tolist(), model.head(x[own])
    return answers
