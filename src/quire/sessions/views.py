"""The views of a session: chances, attention, norms, heat maps, its tree, its summary.

They change nothing. What must be computed runs on a fork, which is gone afterwards. State that was
written into, blended or converted is read as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.base.config import check_int
from quire.base.errors import InvalidArgument
from quire.contracts.layers import LayerSpec
from quire.contracts.token_views import AttentionView, ChancesView, ComparisonView, NormsView
from quire.kv import layer_memory
from quire.sessions import layer_views, token_chances
from quire.sessions.live_sequence import LiveSequence

if TYPE_CHECKING:
    from quire_inspector.drawing.branch_tree import BranchTree
    from quire_inspector.drawing.heat import Heat

MOST_QUERIES = 1024


def token(live: LiveSequence, position: int | None, top: int) -> ChancesView:
    """Return the chances of a token; at None of the next one."""
    check_int("top", top, 1, token_chances.MOST_ALTERNATIVES)
    live.require_open("token")
    position = len(live) if position is None else check_int("position", position, 0, len(live))
    return token_chances.token_view(live.engine, live.branch, position, top)


def attention(live: LiveSequence, position: int | None, layer: int | None, head: int | None) -> AttentionView:
    """Return the attention weights of a token; at None of the last one."""
    live.require_open("attention")
    if not len(live):
        raise InvalidArgument("the session is empty; append at least one token to have one that reads")
    position = len(live) - 1 if position is None else check_int("position", position, 0, len(live) - 1)
    layer, spec = _known_layer(live, layer, _attends)
    layer_views.require_attention(spec, layer)
    if head is not None:
        check_int("head", head, 0, spec.num_heads - 1)  # type: ignore[union-attr]
    return layer_views.attention_view(live.engine, live.branch, position, layer, head)


def norms(live: LiveSequence, layer: int | None) -> NormsView:
    """Return the norms of the rows or states of a layer."""
    live.require_open("norms")
    layer, _ = _known_layer(live, layer, lambda spec: spec.kind != "cross")
    return layer_views.norms_view(live.engine, live.branch, layer)


def compare(live: LiveSequence, other: LiveSequence, top: int) -> ComparisonView:
    """Return the comparison of two sessions of one engine."""
    live.require_open("compare")
    other.require_open("compare")
    return token_chances.comparison_view(live.engine, live.branch, other.branch, top, live.adapters.name_of)


def tree(live: LiveSequence) -> BranchTree:
    """Return the tree of the branches that share a beginning with a session."""
    from quire_inspector.drawing.branch_tree import tree_of
    from quire_inspector.views.state_views import StateViews

    branch = live.require_open("tree")
    views = StateViews(live.engine, live.adapters, "")
    return tree_of(views.history(owner=None), f"the tree of session {branch.number}", f"session:{branch.number}")


def heat(live: LiveSequence, layer: int | None, head: int | None, what: str, queries: int | None) -> Heat:
    """Return a heat map of a layer: attention weights, or norms by position."""
    live.require_open("heat")
    layer, spec = _known_layer(live, layer, _attends if what == "attention" else lambda one: what in _names_of(one))
    names = _names_of(spec)
    if what not in ("attention", *names):
        raise InvalidArgument(field="what", given=what, allowed=" or ".join(map(repr, ("attention", *names))))
    if queries is not None:
        check_int("queries", queries, 1, MOST_QUERIES)
    if what != "attention":
        view = layer_views.norms_view(live.engine, live.branch, layer)
        if head is not None:
            check_int("head", head, 0, view.norms[what].shape[1] - 1)
        from quire_inspector.drawing.painters import norm_heat

        return norm_heat(view, what, head)
    layer_views.require_attention(spec, layer)
    if head is not None:
        check_int("head", head, 0, spec.num_heads - 1)  # type: ignore[union-attr]
    if not len(live):
        raise InvalidArgument("the session is empty; append at least one token to have one that reads")
    return layer_views.attention_heat(live.engine, live.branch, layer, head, queries)


def _known_layer(live: LiveSequence, layer: int | None, fits: Callable[[LayerSpec], bool]) -> tuple[int, LayerSpec]:
    """Return a layer and its geometry, for None the last layer that ``fits``, or just the last;
    ``InvalidArgument`` for another number."""
    last = len(live.engine.runner.model.layer_specs) - 1
    if layer is None:
        found = (one for one in range(last, -1, -1) if fits(live.layer_spec(one)))
        layer = next(found, last)
    check_int("layer", layer, 0, last)
    return layer, live.layer_spec(layer)


def _names_of(spec: LayerSpec) -> tuple[str, ...]:
    """Return the names of a layer's tensors of the session's tokens."""
    return layer_memory.names_of(spec) if spec.kind != "cross" else ()


def _attends(spec: LayerSpec) -> bool:
    return spec.kind not in ("recurrent", "cross")
