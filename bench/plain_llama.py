"""A Llama in plain torch whose prompts can be blended: short, slow, float32, without the engine.

It shares with the engine only the measured parts: ``Selection`` and the scores. Masks are by
position, or aligned at the bottom right, as in CacheBlend's code.

Letters: n tokens of a prompt, of which the first C are exact context; T = n - C rows of the
forward; S rows that continue; L layers; Hq, Hkv heads; D head size; E width; M tokens of a
vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from quire.base.blend_inputs import BlendedRows
from quire.blend.scores import Score, ScoreInputs
from quire.blend.selection import BlendPolicy, Selection
from quire.contracts.attention import Scoring
from quire.ops.attention import weight_sums


@dataclass(frozen=True, eq=False)
class PlainRun:
    """The results of a forward."""

    logits: Tensor
    """``[S, M]``"""
    k: Tensor
    """``[L, n, Hkv, D]``, rotated at the positions of the prompt."""
    v: Tensor
    kept: Tensor
    """int64 ``[S]``: rows of the prompt that ran to the end."""
    token_layers: float
    """Rows that ran, summed over layers; a row that a selecting layer leaves out counts PROJECTION
    there."""
    attended: Tensor
    """``[L, Q, Hq * D]``: attention outputs of the last Q rows, those of the question."""
    read_bytes: int = 0
    """Bytes of cached K and V that were read."""


PROJECTION = 0.1
"""Share of Q, K and V in a layer's linear work."""


class PlainLlama:
    """The weights, and forwards of one prompt."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self._eps: float = config["rms_norm_eps"]
        theta = config["rope_parameters"]["rope_theta"]
        self._weights = {name: w.float() for name, w in load_file(directory / "model.safetensors").items()}
        self._frequencies = theta ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate rows ``[..., tokens, heads, D]`` by the angles of ``positions`` (negative:
        back)."""
        angles = positions.double()[:, None, None] * self._frequencies
        cos, sin = angles.cos().float(), angles.sin().float()
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self._weights[name], self._eps)

    def _projected(self, x: Tensor, layer: int, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self._norm(x, f"model.layers.{layer}.input_layernorm.weight")
        q, k, v = (
            (y @ self._weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"].T).unflatten(
                -1, (-1, self.head_dim)
            )
            for name in "qkv"
        )
        return self.rotated(q, positions), self.rotated(k, positions), v

    def _rest(self, x: Tensor, attended: Tensor, layer: int) -> Tensor:
        prefix = f"model.layers.{layer}."
        x = x + attended @ self._weights[prefix + "self_attn.o_proj.weight"].T
        y = self._norm(x, prefix + "post_attention_layernorm.weight")
        gate, up, down = (self._weights[prefix + f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return x + (functional.silu(y @ gate.T) * (y @ up.T)) @ down.T

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Attend with ``seen``, bool ``[S, n]``."""
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)[0].transpose(0, 1).flatten(1)

    def _logits(self, x: Tensor) -> Tensor:
        head = self._weights.get("lm_head.weight", self._weights["model.embed_tokens.weight"])
        return self._norm(x, "model.norm.weight") @ head.T

    def full(self, tokens: Tensor, asks: int = 1) -> PlainRun:
        """Prefill ``tokens`` in full; the last ``asks`` are the question."""
        n = len(tokens)
        positions = torch.arange(n)
        seen = positions[:, None] >= positions
        x = self._weights["model.embed_tokens.weight"][tokens]
        kept = []
        for layer in range(self.layers):
            q, k, v = self._projected(x, layer, positions)
            attended = self._attended(q, k, v, seen)
            kept.append((k, v, attended[-asks:]))
            x = self._rest(x, attended, layer)
        k, v, asked = (torch.stack(each) for each in zip(*kept, strict=True))
        return PlainRun(self._logits(x), k, v, positions, float(n * self.layers), asked)

    def behind(self, k: Tensor, v: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run ``tokens`` after rows of K and V ``[L, n, Hkv, D]``. Return their logits, and K and V
        of all."""
        positions = torch.arange(k.shape[1], k.shape[1] + len(tokens))
        seen = positions[:, None] >= torch.arange(k.shape[1] + len(tokens))
        x = self._weights["model.embed_tokens.weight"][tokens]
        rows = []
        for layer in range(self.layers):
            q, *fresh = self._projected(x, layer, positions)
            rows.append([torch.cat((old[layer], new)) for old, new in zip((k, v), fresh, strict=True)])
            x = self._rest(x, self._attended(q, *rows[-1], seen), layer)
        k, v = (torch.stack(each) for each in zip(*rows, strict=True))
        return self._logits(x), k, v

    def continuation(self, run: PlainRun, count: int) -> Tensor:
        """Return the ``count`` greedy tokens after a prompt."""
        found, k, v = [run.logits[-1:].argmax(-1)], run.k, run.v
        while len(found) < count:
            logits, k, v = self.behind(k, v, found[-1])
            found.append(logits.argmax(-1))
        return torch.cat(found)

    def common(self, run: PlainRun, continuation: Tensor) -> int:
        """Return the number of greedy tokens after a prompt that equal ``continuation``. One
        forward is enough: up to the first difference both have read the same tokens."""
        logits = torch.cat((run.logits[-1:], self.behind(run.k, run.v, continuation[:-1])[0]))
        return int((logits.argmax(-1) == continuation).long().cumprod(0).sum())

    def blended(
        self,
        tokens: Tensor,
        k: Tensor,
        v: Tensor,
        context: int,
        policy: BlendPolicy,
        score: Score,
        rows: BlendedRows,
        *,
        bottom_right: bool = False,
    ) -> PlainRun:
        """Run ``tokens`` with cached ``k`` and ``v`` ``[L, n, Hkv, D]``, at the prompt's positions.

        The first ``context`` of them are exact. ``rows``: the facts about the others; rows from
        ``question_start`` on have no cached one.
        """
        n = len(tokens)
        count = n - context
        valid = torch.ones(count, dtype=torch.bool)
        valid[rows.question_start :] = False
        selection = Selection(policy, [count], valid.numpy(), [rows])
        positions = torch.arange(context, n)
        x = self._weights["model.embed_tokens.weight"][tokens[context:]]
        long_k, long_v = k.clone(), v.clone()
        spent, mass, read, asked = 0.0, None, 0, list[Tensor]()
        asks = 1 if rows.question_start is None else count - rows.question_start
        row_bytes = k[0, 0].nbytes  # of V as well
        if "question" in score.needs and rows.question_start is not None:
            start = context + rows.question_start
            mass = self.question_mass(tokens, k, v, start, policy.layers[0])
            spent += self.layers * (n - start)
            read += 2 * self.layers * (count - asks) * row_bytes
        for layer in range(self.layers):
            q, fresh_k, fresh_v = self._projected(x, layer, positions)
            long_k[layer, positions], long_v[layer, positions] = fresh_k, fresh_v
            read += 2 * (count - len(positions)) * row_bytes
            if layer in policy.layers:
                read += len(score.needs & {"k", "v"}) * int(selection.scored.size) * row_bytes
                inputs = ScoreInputs(
                    layer_id=layer,
                    selection=selection,
                    candidates=torch.from_numpy(selection.scored),
                    positions=positions,
                    fresh_q=q,
                    fresh_k=fresh_k,
                    fresh_v=fresh_v,
                    cached_k=k[layer, positions],
                    cached_v=v[layer, positions],
                    scale=self.head_dim**-0.5,
                    question_mass=None if mass is None else mass[positions],
                )
                kept = torch.from_numpy(selection.select(layer, score.scores(inputs).numpy()))
                spent += PROJECTION * (len(positions) - len(kept))
                q, x, positions = q[kept], x[kept], positions[kept]
            spent += len(positions)
            places = torch.arange(n - len(positions), n) if bottom_right else positions
            seen = places[:, None] >= torch.arange(n)
            attended = self._attended(q, long_k[layer], long_v[layer], seen)
            asked.append(attended[-asks:])
            x = self._rest(x, attended, layer)
        return PlainRun(self._logits(x), long_k, long_v, positions, spent, torch.stack(asked), read)

    def question_mass(self, tokens: Tensor, k: Tensor, v: Tensor, start: int, layer: int) -> Tensor:
        """Run the rows from ``start`` on alone, over cached rows; return their attention to each
        row of the prompt ``[n]``, from ``layer`` on."""
        places = torch.arange(len(tokens))
        positions = places[start:]
        seen = positions[:, None] >= places
        x = self._weights["model.embed_tokens.weight"][tokens[start:]]
        mass = torch.zeros(len(tokens))
        for at in range(self.layers):
            q, fresh_k, fresh_v = self._projected(x, at, positions)
            long_k, long_v = (torch.cat((old[at, :start], new)) for old, new in ((k, fresh_k), (v, fresh_v)))
            if at >= layer:
                mass += weight_sums(q, long_k, seen, Scoring(self.head_dim**-0.5))
            x = self._rest(x, self._attended(q, long_k, long_v, seen), at)
        return mass
