"""The rule table: what works on which layers, in which combination, on which device, else why not.

A *cell* either works, which means that its results are exact, or has the reason for which the call
is refused before anything is computed. There are four tables: verbs about one layer, by kind of
layer; verbs of the KV state contract, by the parts of a state; what users call, by model; and what
devices do differently. ``quire capabilities`` prints them, ``docs/rules.md`` is made of them
(``as_markdown``), and ``tests/test_rule_table.py`` tries every cell. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.contracts.layers import KeyValueAttention, LayerSpec
from quire.kv.rules import (
    CROSS_VERBS,
    LAYER_KINDS,
    LAYER_VERBS,
    PAGED_REFUSALS,
    PAGED_VERBS,
    RECURRENT_LAYER_VERBS,
    layer_refusal,
    verbs_of,
)


@dataclass(frozen=True, slots=True)
class Cell:
    """Whether a verb works somewhere."""

    reason: str = ""
    """Why it is refused; empty: it works, exactly."""
    note: str = ""
    """What it costs there, or what it is about; only where it works."""

    @property
    def works(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        if self.reason:
            return f"refused: {self.reason}"
        return f"exact; {self.note}" if self.note else "exact"

    def as_json(self) -> dict[str, Any]:
        return {"exact": self.works, "reason": self.reason, "note": self.note}


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """What the layers of a state or model are, as far as rules depend on it."""

    name: str
    kinds: tuple[str, ...]
    """Kinds of layers, each once."""
    models: str = ""
    """Models that are made so; empty: none of this release, and a state alone can be."""
    own_rotation: bool = False
    """Layers put positions into q and k by a rule of their own."""
    every_block_attends: bool = True
    """Each block is one layer with attention, beside a recurrent mixer or not."""

    def has(self, kind: str) -> bool:
        return kind in self.kinds

    @property
    def keeps_rows(self) -> bool:
        """Return whether tokens leave rows in some layer."""
        return any(kind in ("full", "window", "latent") for kind in self.kinds)


COMBINATIONS: tuple[Combination, ...] = (
    Combination(name="full", kinds=("full",), models="Llama, Qwen3, OLMo 2"),
    Combination(name="window", kinds=("window",), models="Mistral with a window"),
    Combination(name="full + window", kinds=("full", "window"), models="Gemma 3, gpt-oss, Cohere2"),
    Combination(name="latent", kinds=("latent",), models="DeepSeek V2 and V3, GLM-4-MoE-Lite, Youtu"),
    Combination(name="recurrent", kinds=("recurrent",), models="Mamba-2", every_block_attends=False),
    Combination(
        name="full + recurrent",
        kinds=("full", "recurrent"),
        models="Qwen3-Next, Bamba, Granite-4, LFM2, Nemotron-H",
        every_block_attends=False,
    ),
    Combination(name="full beside recurrent", kinds=("full", "recurrent"), models="Falcon-H1"),
    Combination(
        name="fallback",
        kinds=("full",),
        models="any other decoder of transformers",
        own_rotation=True,
        every_block_attends=False,
    ),
    Combination(name="full + cross", kinds=("full", "cross")),
    Combination(name="latent + recurrent", kinds=("latent", "recurrent"), every_block_attends=False),
    Combination(name="full + window + latent", kinds=("full", "window", "latent")),
)
"""The combinations in use. Others follow from the kinds that are in them (``combination_of``)."""

MODELS: tuple[Combination, ...] = tuple(one for one in COMBINATIONS if one.models)
"""Those that models are made of."""


def combination_of(specs: Sequence[LayerSpec], num_blocks: int) -> Combination:
    """Return the combination of a model with these layers, by its kinds and not by its family."""
    kinds = {spec.kind for spec in specs}
    return Combination(
        name="this model",
        kinds=tuple(kind for kind in LAYER_KINDS if kind in kinds),
        models="this model",
        own_rotation=any(isinstance(spec, KeyValueAttention) and spec.caller_rotates for spec in specs),
        every_block_attends=not weights_refusal(specs, num_blocks),
    )


# -- verbs about one layer, by kind ----------------------------------------------------------------

LAYER_ROWS: tuple[str, ...] = (*LAYER_VERBS, *CROSS_VERBS, *RECURRENT_LAYER_VERBS)
"""Verbs that are given a layer."""


def layer_cell(verb: str, kind: str) -> Cell:
    """Return the cell of one of ``LAYER_ROWS`` on a layer of one of ``LAYER_KINDS``."""
    return Cell(layer_refusal(verb, kind))


LAYER_DETAILS: dict[str, str] = {
    "attention_with_shared_kv over a layer with learned sink logits": "which belong to its own heads",
    "linear_attention on a layer whose state 0 is something else": "float32 [heads, Dk, Dv] is needed",
}
"""Refusals that depend on more than the kind of the layer: what is asked for, and the reason."""


# -- verbs of the KV state contract ----------------------------------------------------------------

STATE_ROWS: tuple[str, ...] = tuple(sorted((*PAGED_VERBS, *PAGED_REFUSALS)))
"""Every verb of the contracts of a KV state."""

_RUN_AGAIN = "goes to the nearest kept state and returns the tokens to run again"
_BEHIND_WINDOWS = "positions that `reachable` names; a window has let go of the others"


def _rewind_note(found: Combination) -> str:
    notes = [_RUN_AGAIN] if found.has("recurrent") else []
    return "; ".join([*notes, *([_BEHIND_WINDOWS] if found.has("window") else [])])


def _others_note(found: Combination, verb: str) -> str:
    """Return a note of the layer kinds that have the verb; empty: all have it."""
    having = [kind for kind in found.kinds if not layer_refusal(verb, kind)]
    return "" if len(having) == len(found.kinds) else f"on layers of kind {' and '.join(having)}"


def state_cell(verb: str, found: Combination) -> Cell:
    """Return the cell of one of ``STATE_ROWS`` on a state with such layers."""
    if reason := verbs_of(found.kinds)[verb]:
        # Which kinds there are is said by the column.
        return Cell(layer_refusal(verb, found.kinds[0]) if verb in LAYER_VERBS else reason)
    if verb in LAYER_ROWS:
        return Cell(note=_others_note(found, verb))
    if verb in ("fork_sequence", "popn", "rewind_cost", "reachable"):
        return Cell(note=_rewind_note(found))
    if verb == "enable_sliding_window_for_seq":
        return _session_window(found) if not found.own_rotation else Cell(note="without a sink")
    if verb == "checkpoints" and not found.has("recurrent"):
        return Cell(note="there are none, since nothing must be run again")
    if verb == "num_available_pages" and not found.keeps_rows:
        return Cell(note="counts slots for states")
    return Cell()


# -- what users call -------------------------------------------------------------------------------

WINDOWS_OF_NOTHING = verbs_of(("recurrent",))["enable_sliding_window_for_seq"]
SINK_OF_OWN_ROTATION = (
    "put positions into q and k by a rule of their own, so that the query cannot be moved next to the sink; give sink=0"
)
MASK_OF_RECURRENT = "in order, and no mask can change that"
NO_KV = "keeps no K and V"
NO_PAGES = "the model has recurrent layers only, whose state lies in no pages of tokens"
ADAPTERS_OF_FALLBACK = "runs through transformers' layers (the fallback), which they cannot change"
WEIGHTS_OF_BLOCKS = "not every block is one layer with attention; leave output_attentions False"


def weights_refusal(specs: Iterable[LayerSpec], num_blocks: int) -> str:
    """Return the reason against attention weights by block for these layers; empty: none."""
    attending = sum(spec.kind not in ("recurrent", "cross") for spec in specs)
    return "" if attending == num_blocks else WEIGHTS_OF_BLOCKS


POSITIONS_OF_RECURRENT = (
    "recurrent layers take the tokens of a row in order and know no positions; leave position_ids None"
)
POSITIONS_OF_WINDOWS = "a window counts tokens by their index in the row; leave position_ids None"
POSITIONS_OF_OWN_ROTATION = "its layers put positions into q and k by a rule of their own; leave position_ids None"


def position_refusal(specs: Iterable[LayerSpec]) -> str:
    """Return the reason against positions other than indices in these layers; empty: none."""
    found = list(specs)
    if any(spec.kind == "recurrent" for spec in found):
        return POSITIONS_OF_RECURRENT
    if any(spec.kind == "window" for spec in found):
        return POSITIONS_OF_WINDOWS
    attending = [spec for spec in found if isinstance(spec, KeyValueAttention)]
    # Keys that are rotated when they are read (``inline``) are so at their indices.
    own = any(spec.caller_rotates or spec.rope_mode == "inline" for spec in attending)
    return POSITIONS_OF_OWN_ROTATION if own else ""


def _session_rewind(found: Combination) -> Cell:
    notes = ["tokens since the nearest kept state are run again"] if found.has("recurrent") else []
    if found.has("window"):
        notes.append("behind a window its tokens are run again")
    return Cell(note="; ".join(notes))


def blending_refusal(kinds: Iterable[str], *, own_rotation: bool) -> str:
    """Return the reason against blending prompts over layers of these kinds; empty: none."""
    if "recurrent" in kinds:
        return "a recurrent state cannot be moved to another place, and its layers need every token; prefixes are reused exactly"
    if "cross" in kinds:
        return "cross layers keep what an encoder read, which stands nowhere in the prompt"
    return "the model rotates queries and keys by a rule of its own" if own_rotation else ""


def _blending(found: Combination) -> Cell:
    reason = blending_refusal(found.kinds, own_rotation=found.own_rotation)
    return Cell(reason) if reason else Cell(note="with ratio 1; below, approximate and said to be so")


def _session_edit(found: Combination) -> Cell:
    notes = filter(None, ("what follows is run again", _session_rewind(found).note))
    return Cell(note="; ".join(notes))


def _session_window(found: Combination) -> Cell:
    if not found.keeps_rows:
        return Cell(WINDOWS_OF_NOTHING)
    if found.own_rotation:
        return Cell(note="up to the model's context")
    others = [kind for kind in ("recurrent", "cross") if found.has(kind)]
    return Cell(note=f"{' and '.join(others)} layers are not concerned" if others else "")


def _session_sink(found: Combination) -> Cell:
    if found.keeps_rows and found.own_rotation:
        return Cell(SINK_OF_OWN_ROTATION)
    return _session_window(found)


def _mask(found: Combination) -> Cell:
    return Cell(MASK_OF_RECURRENT if found.has("recurrent") else "")


def _positions(found: Combination) -> Cell:
    if found.has("recurrent"):
        return Cell(POSITIONS_OF_RECURRENT)
    if found.has("window"):
        return Cell(POSITIONS_OF_WINDOWS)
    return Cell(POSITIONS_OF_OWN_ROTATION if found.own_rotation else "")


def _layer_memory(found: Combination) -> Cell:
    """Reading the rows and states of layers."""
    return Cell(note="of recurrent layers the states before the last token" if found.has("recurrent") else "")


def _prefix(found: Combination) -> Cell:
    if found.has("recurrent") or found.has("window"):
        return Cell(note="at prompt and turn ends, where states are kept")
    return Cell()


def _adapters(found: Combination) -> Cell:
    if found.own_rotation:
        return Cell(ADAPTERS_OF_FALLBACK)
    return Cell(note="of projections, embedding and head; what else one changes is refused by name when it is loaded")


def _always(note: str = "") -> Callable[[Combination], Cell]:
    return lambda found: Cell(note=note)


USES: dict[str, Callable[[Combination], Cell]] = {
    "generate": _always(),
    "n samples of one prompt": _always(),
    "stream and cancel": _always(),
    "AsyncLLM": _always(),
    "beam search": _always(),
    "structured outputs": _always("with a tokenizer"),
    "logits processors": _always(),
    "prompt logprobs": _always(),
    "prefix cache": _prefix,
    "blending": _blending,
    "preemption": _always(),
    "host memory": _always(),
    "Session.fork": _session_rewind,
    "Session.rewind": _session_rewind,
    "Session.edit": _session_edit,
    "Session.score": _always(),
    "Session.logits": _always(),
    "Session.save and load_session": _always(),
    "Session.kv": _layer_memory,
    "Session.set_kv": _layer_memory,
    "windowed sessions": _session_window,
    "windowed sessions with a sink": _session_sink,
    "token trees and commit": _always(),
    "verify and rewind": _session_rewind,
    "masks": _mask,
    "embeddings in place of tokens": _always(),
    "hidden states": lambda found: Cell(
        note="one tensor, behind the last norm, since all layers are one block" if found.own_rotation else ""
    ),
    "attention weights": lambda found: Cell("" if found.every_block_attends else WEIGHTS_OF_BLOCKS),
    "executor: prefill and decode": _always(),
    "executor: batches": _always(),
    "executor: position_ids": _positions,
    "executor: sample_tokens": _always(),
    "executor: truncate_kv": _session_rewind,
    "executor: forward_verify and commit_path": _always(),
    "executor: speculative_decode and batch_speculative_decode": _always(),
    "executor: select, broadcast and copy": _always(),
    "executor: serialize and load": _always(),
    "executor: key_cache and value_cache": lambda found: (
        Cell(note=_others_note(found, "debug_get_kv")) if found.has("full") or found.has("window") else Cell(NO_KV)
    ),
    "executor: block_table": lambda found: Cell("" if found.keeps_rows else NO_PAGES),
    "executor: images that see each other": _mask,
    "executor: clear, resize and release": _always(),
    "executor: cancel": _always(),
    "executor: reports": _always(),
    "executor: adapters": _adapters,
}
"""What users call, and what it is on each combination."""

USE_ROWS: tuple[str, ...] = tuple(USES)


def use_cell(use: str, found: Combination) -> Cell:
    """Return the cell of one of ``USE_ROWS`` on a model with such layers."""
    return USES[use](found)


# -- devices ---------------------------------------------------------------------------------------

DEVICES = ("cpu", "cuda")
FORMAT_FALLBACK = (
    "by the reference attention, which is slow and which the log says; all formats of this release are read"
)
DEVICE_ROWS: dict[str, tuple[Cell, Cell]] = {
    "every verb and use above": (Cell(), Cell(note="the same code, on Triton's and PyTorch's kernels")),
    "weights in float32": (Cell(), Cell()),
    "weights in bfloat16": (Cell(note="'auto' takes it where it is fast"), Cell()),
    "weights in float16": (Cell(), Cell()),
    "K and V in a format that the attention backend cannot read": (
        Cell(note=FORMAT_FALLBACK),
        Cell(note=FORMAT_FALLBACK),
    ),
    "log-sum-exp of attention": (
        Cell(
            note="good to float32 for every type: by PyTorch's flash kernel where there is no soft cap, else by explicit scores"
        ),
        Cell(note="good to float32 for every type: by explicit scores"),
    ),
    "low-rank products of adapters": (
        Cell(
            note="in C++ for float32 and bfloat16, where there was a compiler at installation; else PyTorch's, which the log says"
        ),
        Cell(note="PyTorch's products"),
    ),
    "packed weights": (
        Cell(note="bfloat16, on processors whose instructions oneDNN can use; else plain weights"),
        Cell(note="plain weights"),
    ),
    "experts in one grouped call": (
        Cell(note="one product for each expert that is chosen"),
        Cell(note="bfloat16 on recent GPUs; else one product for each expert that is chosen"),
    ),
}
"""What devices do differently. Speed differs, and rounding; what is computed does not."""
OTHER_DEVICES: dict[str, str] = {"device='mps' and others": "is not supported; 'auto', 'cpu' and 'cuda' are"}
"""What there is no column for, with the reason."""


BESIDES = {"verbs about one layer": LAYER_DETAILS, "devices": OTHER_DEVICES}
"""By title of a table: what is refused beside its cells."""


# -- the whole table -------------------------------------------------------------------------------


def rules_of(found: Combination) -> dict[str, dict[str, Cell]]:
    """Return the rules of one model: every verb of its state, and everything that users call."""
    return {
        "state": {verb: state_cell(verb, found) for verb in STATE_ROWS},
        "uses": {use: use_cell(use, found) for use in USE_ROWS},
    }


def tables() -> dict[str, dict[str, dict[str, Cell]]]:
    """Return all tables: by title, row and column."""
    return {
        "verbs about one layer": {verb: {kind: layer_cell(verb, kind) for kind in LAYER_KINDS} for verb in LAYER_ROWS},
        "verbs of a KV state": {verb: {one.name: state_cell(verb, one) for one in COMBINATIONS} for verb in STATE_ROWS},
        "what users call": {use: {one.name: use_cell(use, one) for one in MODELS} for use in USE_ROWS},
        "devices": {what: dict(zip(DEVICES, cells, strict=True)) for what, cells in DEVICE_ROWS.items()},
    }
