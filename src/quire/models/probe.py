"""Finding the attention of a ``transformers`` model, and that nothing else decides its logits.

``watch`` runs the model on a few tokens with an attention function that records each layer's
arguments. Instead of masks it receives their rules, so windows and chunks of any length are found.
``Probe.compare`` runs the model in pieces, two sequences at a time, and compares with its own
logits.

Letters: T new tokens, M keys, V vocabulary, Hq, Hkv query and KV heads, Dk, Dv head sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.base.errors import CheckpointError, Unsupported
from quire.contracts.attention import Scoring
from quire.contracts.layers import FullAttention, WindowedAttention
from quire.contracts.model import Model
from quire.ops.attention import masked_scores, weigh

ATTENTION = "quire"
"""Name of our attention function in transformers."""
WATCHED = "quire_watched"
"""Name of the attention function that records the layers' arguments."""

TOKENS = 24
"""Tokens of the probe."""

IGNORED = frozenset(
    [
        "dropout",
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "is_causal",
        "sliding_window",
        "quire_pass",
        "quire_watch",
        "position_embeddings",
        "cache_position",
        "logits_to_keep",
        "past_key_values",
    ]
)
"""Arguments of an attention call without effect here; the window is in the mask's rule."""

FAILURES = (TypeError, RuntimeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)
"""Exceptions of a transformers model in a forward that does not fit its configuration."""

Spec = FullAttention | WindowedAttention


@dataclass(frozen=True, slots=True)
class Rule:
    """A mask's rule, passed in place of the mask."""

    sees: Callable[..., Any]
    """Maps (batch, head, query, key) to True if the query sees the key; takes tensors."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The specs that were found, and the model's own logits."""

    what: str
    specs: tuple[Spec, ...]
    tokens: tuple[int, ...]
    logits_TV: Tensor

    def compare(self, model: Model) -> None:
        """Raise ``Unsupported`` unless ``model`` gives these logits piece by piece in a batch."""
        device = self.logits_TV.device
        pass_: Any = ProbePass(self.specs, device)
        ids = torch.tensor(self.tokens, device=device)
        cut = TOKENS // 3
        found = []
        with torch.no_grad():
            for start, stop in ((0, cut), (cut, cut + 1), (cut + 1, TOKENS)):
                # The other sequence is the same one, begun again at each piece.
                pass_.open(start, stop, stop - start)
                x = model.embed(torch.cat((ids[start:stop], ids[: stop - start])))
                try:
                    for block in model.blocks:
                        x = block(x, pass_)
                    found.append(model.head(x[: stop - start]))
                except FAILURES as error:
                    raise Unsupported(
                        f"architecture {self.what}: its layers do not run piece by piece: {error}"
                    ) from error
        self._check(torch.cat(found))

    def _check(self, found_TV: Tensor) -> None:
        expected = self.logits_TV
        dtype = torch.float32 if expected.dtype == torch.float32 else expected.dtype
        # As for native families: a layer's error grows with the root of its width; layers add up.
        width = max(spec.num_heads * spec.head_dim for spec in self.specs)
        bound = 4 * len(self.specs) * math.sqrt(width) * torch.finfo(dtype).eps
        error = float((found_TV.float() - expected.float()).abs().max() / expected.float().abs().max())
        if not error < bound:
            raise Unsupported(
                f"architecture {self.what}: its logits depend on more than tokens, positions and attention over K and V "
                f"(off by {error:.1e} of the largest, {bound:.1e} is rounding)"
            )


def core_name(causal: Any) -> str:
    """Return the name of the attribute with a model's layers. Llama 4's text model is named after
    its place in the model that reads images."""
    name = str(causal.base_model_prefix)
    return name if hasattr(causal, name) else "model"


def register() -> None:
    """Register our attention functions in transformers; repeated calls are harmless."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend_in_pass)
    ALL_ATTENTION_FUNCTIONS.register(WATCHED, attend_and_note)
    ALL_MASK_ATTENTION_FUNCTIONS.register(WATCHED, keep_rule)


def keep_rule(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> Rule:
    """Return the rule of a mask in place of the mask."""
    del args, kwargs
    return Rule(mask_function)


def attend_in_pass(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Map q, k, v ``[1, H, T, D]`` to ``[1, T, Hq, Dv]`` through the pass of the call."""
    pass_ = kwargs.get("quire_pass")
    if pass_ is None:
        raise Unsupported(f"{type(module).__name__} does not hand on the arguments of its model's call")
    del attention_mask
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    return pass_.attend(module.layer_idx, q_THD, k_THD, v_THD).unsqueeze(0), None


def attend_and_note(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend naively for ``watch``, and record the layer's arguments."""
    notes: Notes | None = kwargs.get("quire_watch")
    if notes is None:
        raise Unsupported(f"{type(module).__name__} does not hand on the arguments of its model's call")
    spec = notes.note(module, query, key, value, attention_mask, kwargs)
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    places = torch.arange(q_THD.shape[0], device=q_THD.device)
    return naive(spec, q_THD, k_THD, v_THD, places, places).unsqueeze(0), None


def naive(spec: Spec, q_THD: Tensor, k_MHD: Tensor, v_MHD: Tensor, q_T: Tensor, k_M: Tensor) -> Tensor:
    """Attend from positions ``q_T`` to keys at positions ``k_M`` by the reference."""
    visible_TM = k_M <= q_T.unsqueeze(1)
    if spec.layer_window is not None:
        visible_TM &= k_M > q_T.unsqueeze(1) - spec.layer_window
    sinks = torch.tensor(spec.sinks, device=q_THD.device) if spec.sinks else None
    scores = masked_scores(q_THD, k_MHD, visible_TM, Scoring(spec.scale, spec.softcap))
    return weigh(scores, v_MHD, q_THD.dtype, sinks).out


class Notes:
    """The recorded attention specs, by layer."""

    def __init__(self, what: str, length: int) -> None:
        self.what = what
        self.length = length
        self.specs: dict[int, Spec] = {}

    def refuse(self, reason: str) -> Unsupported:
        return Unsupported(f"architecture {self.what}: {reason}")

    def note(self, module: Any, query: Tensor, key: Tensor, value: Tensor, rule: Any, kwargs: dict[str, Any]) -> Spec:
        """Return the spec of the layer that made this call."""
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise self.refuse(f"{type(module).__name__} does not say which layer it is")
        if layer in self.specs:
            raise self.refuse(f"layer {layer} attends more than once in a forward")
        extra = sorted(
            name
            for name, given in kwargs.items()
            if given is not None and name not in IGNORED | {"scaling", "softcap", "s_aux"}
        )
        if extra:
            raise self.refuse(f"layer {layer} calls attention with {', '.join(extra)}, which ours does not take")
        if key.shape[2] != query.shape[2] or query.shape[0] != 1:
            raise self.refuse(f"layer {layer} attends to {key.shape[2]} keys from {query.shape[2]} queries")
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
            raise self.refuse(
                f"layer {layer} has {query.shape[1]} query, {key.shape[1]} key, {value.shape[1]} value heads"
            )
        scaling, sinks = kwargs.get("scaling"), kwargs.get("s_aux")
        given: dict[str, Any] = {
            "num_heads": query.shape[1],
            "num_kv_heads": key.shape[1],
            "head_dim": query.shape[3],
            "value_dim": value.shape[3],
            "sm_scale": None if scaling is None else float(scaling),
            "softcap": None if not kwargs.get("softcap") else float(kwargs["softcap"]),
            "sinks": () if sinks is None else tuple(sinks.detach().float().flatten().tolist()),
            "caller_rotates": True,
        }
        window = self.window_of(layer, module, rule)
        spec: Spec = FullAttention(**given) if window is None else WindowedAttention(**given, window=window)
        self.specs[layer] = spec
        return spec

    def window_of(self, layer: int, module: Any, rule: Any) -> int | None:
        """Return the layer's window, None for full attention; refuse every other rule."""
        if rule is None:
            if not getattr(module, "is_causal", True):
                raise self.refuse(f"layer {layer} is not causal")
            return None
        if not isinstance(rule, Rule):
            raise self.refuse(f"layer {layer} attends by a mask of its own")
        last = self.length - 1
        window = self._width(layer, rule, last)
        for query in {
            0,
            1,
            2,
            3,
            7,
            last // 3,
            last // 2,
            *((window - 1, window, window + 1) if window < last else ()),
        }:
            if 0 <= query <= last and self._width(layer, rule, query) != min(window, query + 1):
                raise self.refuse(f"layer {layer} attends by a rule that is neither causal nor a sliding window")
        return None if window > last else window

    def _width(self, layer: int, rule: Rule, query: int) -> int:
        """Return the number of keys that a query sees; refuse unless they are consecutive and end
        with its own."""
        keys = torch.arange(query + 3)
        try:
            seen = torch.as_tensor(rule.sees(torch.tensor(0), torch.tensor(0), torch.tensor(query), keys)).expand(
                query + 3
            )
        except (IndexError, RuntimeError, TypeError) as error:
            raise self.refuse(f"layer {layer} attends by a mask that depends on the batch: {error}") from error
        found = seen.nonzero().flatten()
        if not len(found) or int(found[-1]) != query or len(found) != query - int(found[0]) + 1:
            raise self.refuse(f"layer {layer} attends by a rule that is neither causal nor a sliding window")
        return len(found)


class ProbePass:
    """Passes over K and V of two sequences for ``Probe.compare``: one continues, one begins again
    in each. It has the methods of a ``contracts.model.Pass`` that ``attend_in_pass`` and
    ``FallbackModel`` call."""

    def __init__(self, specs: Sequence[Spec], device: torch.device) -> None:
        self.specs, self.device = list(specs), device
        self.k = [torch.empty(0, device=device)] * len(specs)
        self.v = [torch.empty(0, device=device)] * len(specs)
        self.open(0, 0, 0)

    def open(self, start: int, stop: int, other: int) -> None:
        """Open a pass: positions ``start..stop - 1`` of one sequence, ``other`` tokens of a new
        one."""
        self.start = start
        self.first_T = torch.arange(start, stop, device=self.device)
        self.other_T = torch.arange(other, device=self.device)

    @property
    def positions_T(self) -> Tensor:
        return torch.cat((self.first_T, self.other_T)).to(torch.int32)

    def attend(self, layer_id: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        spec, count, start = self.specs[layer_id], len(self.first_T), self.start
        k, v = k_THD[:count], v_THD[:count]
        if start:
            k, v = torch.cat((self.k[layer_id], k)), torch.cat((self.v[layer_id], v))
        self.k[layer_id], self.v[layer_id] = k, v
        keys = torch.arange(start + count, device=self.device)
        a = naive(spec, q_THD[:count], k, v, self.first_T, keys)
        b = naive(spec, q_THD[count:], k_THD[count:], v_THD[count:], self.other_T, self.other_T)
        return torch.cat((a, b))


def watch(causal: Any, length: int, what: str) -> Probe:
    """Run the model alone and with a recording attention; raise ``Unsupported`` if our attention
    cannot replace its own."""
    register()
    device = causal.get_input_embeddings().weight.device
    vocab = causal.get_output_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (1, min(TOKENS, length)), generator=generator)
    if ids.shape[1] < TOKENS:
        raise Unsupported(f"architecture {what}: a context of {length} tokens; the fallback needs at least {TOKENS}")
    notes = Notes(what, length)
    with torch.no_grad():
        try:
            expected_TV = causal(ids.to(device), use_cache=False).logits[0]
        except FAILURES as error:
            raise CheckpointError(f"{what}: transformers cannot run its own model: {error}") from error
        causal.set_attn_implementation(WATCHED)
        try:
            getattr(causal, core_name(causal))(input_ids=ids.to(device), use_cache=False, quire_watch=notes)
        except FAILURES as error:
            raise Unsupported(f"architecture {what}: its attention cannot be replaced: {error}") from error
    layers = sorted(notes.specs)
    wanted = getattr(causal.config.get_text_config(decoder=True), "num_hidden_layers", len(layers))
    if layers != list(range(wanted)):
        raise Unsupported(f"architecture {what}: layers {layers} attend through transformers' interface, of {wanted}")
    return Probe(what, tuple(notes.specs[layer] for layer in layers), tuple(ids[0].tolist()), expected_TV)
