"""The parts of a model that adapters can change: linear maps by name, with their checkpoint names.

A module of a checkpoint (``model.layers.3.self_attn.k_proj``) is a range of rows of a linear map
here ("3.qkv"); the name table that loaded the model gives the range. Adapters cannot target a
module whose weight is used in another form than ``y = x W^T + b``; such a module has a reason.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from quire.base.errors import QuireError
from quire.contracts.model import Model, stages_of
from quire.models.families import LoadedModel, name_tables_of
from quire.nn.embedding import Embedding
from quire.nn.linear import Linear
from quire.nn.packed import LAYERS, parts_of
from quire.weights.places import NameTable

EMBED, HEAD = "embed", "head"
"""The names of the embedding's table and of the head, in updates and tables of adapters."""
TRUNKS: tuple[tuple[str, str], ...] = (
    ("model.language_model.", "lm_head"),
    ("language_model.model.", "language_model.lm_head"),
    ("model.", "lm_head"),
)
"""Prefix of the module names, and name of the head, of a language model beside an encoder: as in
current transformers, in older files, and in a text model alone."""
REASONS: tuple[tuple[str, str], ...] = (
    (".experts.", "it is one of a mixture's experts"),
    (".router.", "it is the router of a mixture of experts"),
    (".kv_up.", "latent attention uses its weight in two other forms"),
    (".conv.", "it is a convolution"),
    (".mixer.project.", "its rows stand in another order here"),
    (".mixer.rates.", "its rows stand in another order here"),
)
"""Parts of the names of parameters that adapters cannot change, with the reason."""
ENCODERS = frozenset(
    {
        "audio_model",
        "audio_projector",
        "audio_tower",
        "connector",
        "embed_audio",
        "embed_vision",
        "image_projection",
        "mm_projector",
        "multi_modal_projector",
        "patch_merger",
        "speech_encoder",
        "vision_embed_tokens",
        "vision_encoder",
        "vision_model",
        "vision_projection",
        "vision_tower",
        "visual",
    }
)
"""Name parts of modules beside a language model, as transformers and others call them: encoders of
images and sound, and the projections from them to the language model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterTarget:
    """Outputs ``row`` to ``row + outs`` of a linear map, or the embedding (``ins`` tokens)."""

    linear: str
    row: int
    outs: int
    ins: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterTargets:
    """The modules of a model in one spelling."""

    targets: Mapping[str, AdapterTarget]
    refused: Mapping[str, str] = field(default_factory=dict)
    """The other modules that hold weights, with the reason why adapters cannot change them."""

    def named(self, linear: str) -> str:
        """Return the name of the embedding's or the head's module; empty if there is none."""
        return next((name for name, target in self.targets.items() if target.linear == linear), "")

    def endings(self) -> str:
        """List the last parts of the names of adaptable modules, for error messages."""
        return ", ".join(sorted({name.rpartition(".")[2] for name in self.targets}))


def low_rank_refusal(model: Model) -> str:
    """Return the reason why the model can have no adapters; empty if it can."""
    if getattr(model, "fallback", False):
        return (
            "adapters: this architecture is not native and runs through transformers' layers (the fallback), which they "
            "cannot change; see `quire models` for native ones"
        )
    found = next(_named(model), None)
    return "" if found is not None else "adapters: this model has no linear maps that they could change"


def embedding_of(model: Model) -> Embedding | None:
    """Return the embedding that adapters can change; None if the model has no ``Embedding``."""
    found = getattr(model, "embedding", None)
    return found if isinstance(found, Embedding) else None


def linears_of(model: Model) -> dict[str, Linear]:
    """Return all named linear maps by name, "head", packed ones and those of other stages
    included."""
    found: dict[str, Linear] = {}
    for linear in _named(model):
        if found.setdefault(linear.name, linear) is not linear:
            raise QuireError(f"two linear maps of the model are called {linear.name!r}")
    return found


def absent_linears(model: Model) -> frozenset[str]:
    """Return the names of the linear maps of other stages."""
    parts = (*getattr(model, "absent_blocks", ()), getattr(model, "lm_head", None))
    stages = stages_of(model)
    if stages is None:
        return frozenset()
    return frozenset(one.name for part in parts[: -1 if stages.is_last else None] for one in _walk(part))


def _named(model: Model) -> Iterator[Linear]:
    for part in (*model.blocks, *getattr(model, "absent_blocks", ()), getattr(model, "lm_head", None)):
        yield from _walk(part)


def _walk(part: object) -> Iterator[Linear]:
    """Yield the named linear maps of ``part`` and of its attributes, recursively."""
    if isinstance(part, Linear):
        if part.name:
            yield part
    elif isinstance(part, list | tuple):
        for one in part:
            yield from _walk(one)
    elif type(part).__module__.startswith(LAYERS):
        for _, one in parts_of(part):
            yield from _walk(one)


def targets_of(model: LoadedModel) -> AdapterTargets:
    """Return the model's modules in its checkpoint's spelling; empty without a name table."""
    return _targets_in(model.places, linears_of(model))


def _targets_in(places: NameTable, linears: Container[str]) -> AdapterTargets:
    targets: dict[str, AdapterTarget] = {}
    refused: dict[str, str] = {}
    for name, own in places.items():
        place = own.whole or own  # as the adapter's files have it
        module, _, part = name.rpartition(".")
        if part != "weight":
            if len(place.shape) > 2:  # stacks of matrices have no suffix
                refused[name] = _reason(place.parameter)
            continue
        parameter = place.parameter.removesuffix(".weight")
        if parameter == EMBED:
            tokens, width = place.shape
            targets[module] = AdapterTarget(linear=EMBED, row=0, outs=width, ins=tokens)
        elif parameter in linears and len(place.shape) == 2:
            targets[module] = AdapterTarget(linear=parameter, row=place.row, outs=place.shape[0], ins=place.shape[1])
        else:
            refused[module] = _reason(place.parameter)
    found = AdapterTargets(targets=targets, refused=refused)
    if HEAD in linears and not found.named(HEAD) and (embedding := found.named(EMBED)):
        # A tied head has no tensor of its own in the files.
        head = next((head for trunk, head in TRUNKS if embedding.startswith(trunk)), "lm_head")
        targets[head] = AdapterTarget(linear=HEAD, row=0, outs=targets[embedding].ins, ins=targets[embedding].outs)
    return found


def _reason(parameter: str) -> str:
    return next((reason for part, reason in REASONS if part in parameter), "it is no linear map")


def encoder_in(module: str) -> str:
    """Return the part of the name that marks a module of an encoder; empty if there is none."""
    return next((part for part in module.split(".") if part in ENCODERS), "")


def spelled(model: LoadedModel, modules: Collection[str]) -> AdapterTargets:
    """Return the model's targets in the spelling that matches most names of an adapter's
    ``modules``: of the checkpoint, or of other files of its family, one of which names modules as
    transformers does. Among equals, prefer the checkpoint's own."""

    def matches(one: AdapterTargets) -> int:
        return sum(name in one.targets or name in one.refused for name in modules)

    own = targets_of(model)
    return own if matches(own) == len(modules) else max(_spellings(model, own), key=matches)


def _spellings(model: LoadedModel, own: AdapterTargets) -> Iterator[AdapterTargets]:
    linears = linears_of(model)
    for targets in (own, *(_targets_in(places, linears) for places in name_tables_of(model.config))):
        yield targets
        ours = _trunk(targets.named(EMBED))
        if ours is not None and ours != TRUNKS[-1]:
            yield from (_respelled(targets, ours, theirs) for theirs in TRUNKS)


def _trunk(embedding: str) -> tuple[str, str] | None:
    return next((one for one in TRUNKS if embedding.startswith(one[0])), None)


def _respelled(targets: AdapterTargets, ours: tuple[str, str], theirs: tuple[str, str]) -> AdapterTargets:
    def name(module: str) -> str:
        if module == ours[1]:
            return theirs[1]
        return theirs[0] + module.removeprefix(ours[0]) if module.startswith(ours[0]) else module

    return AdapterTargets(
        targets={name(module): target for module, target in targets.targets.items()},
        refused={name(module): reason for module, reason in targets.refused.items()},
    )


def table_of(model: LoadedModel, linear: str) -> Tensor:
    """Return the table ``[V, E]`` of the embedding or the head as plain rows, even if packed."""
    maps, embedding = linears_of(model), embedding_of(model)
    assert embedding is not None
    if linear == EMBED or model.tied:
        return embedding.plain_weight()
    return maps[linear].plain_weight()
