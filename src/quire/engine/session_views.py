"""What a session shows of its tokens: chances, attention, norms, and where another one parts."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import RenderableType

from quire.config import check_int
from quire.contracts.layers import LayerSpec
from quire.contracts.token_views import AttentionView, ChancesView, ComparisonView, NormsView
from quire.drawing.branch_tree import BranchTree, tree_of
from quire.drawing.heat import Heat
from quire.drawing.painters import norm_heat
from quire.drawing.summaries import Summary
from quire.engine import layer_memory
from quire.engine.session_repr import session_summary
from quire.engine.state_access import StateAccess
from quire.engine.views import layer_looks, token_chances
from quire.engine.views.state_views import StateViews
from quire.errors import InvalidArgument
from quire.interrupts import uninterrupted

MOST_QUERIES = 1024


class SessionViews(StateAccess):
    """A live sequence that can be looked at. Looking changes nothing. What must be computed runs on
    a fork, which is gone afterwards. State that was written into, blended or converted is read as
    it is."""

    @uninterrupted
    def token(self, position: int | None = None, *, top: int = 10) -> ChancesView:
        """Return what the model thinks of the token at ``position``, after those before it: its
        probability and rank, the ``top`` most probable tokens (1..100), and which mask and which
        stop are noted there. At ``len(session)``, or None, the token that comes next is meant.

        ``InvalidArgument``: no such position. ``FailedPrecondition``: the session is generating, or
        the state before was changed and would have to be computed again.
        """
        check_int("top", top, 1, token_chances.MOST_ALTERNATIVES)
        self._open("token")
        position = len(self) if position is None else check_int("position", position, 0, len(self))
        return token_chances.token_view(self._engine, self._state, position, top)

    @uninterrupted
    def attention(
        self, position: int | None = None, layer: int | None = None, head: int | None = None
    ) -> AttentionView:
        """Return what the token at ``position`` (None: the last one) reads at a layer (None: the
        last one with attention): the weights, float32, of its query over all positions up to its
        own, of one query head or of all.

        Its own row is computed anew, like that of the last token before a generation.
        ``InvalidArgument``: no such position, layer or head. ``Unsupported``: the layer has no
        attention over tokens. ``FailedPrecondition``: as of ``token``.
        """
        self._open("attention")
        if not len(self):
            raise InvalidArgument("the session is empty; append at least one token to have one that reads")
        position = len(self) - 1 if position is None else check_int("position", position, 0, len(self) - 1)
        layer, spec = self._known_layer(layer, _attends)
        layer_looks.require_attention(spec, layer)
        if head is not None:
            check_int("head", head, 0, spec.num_heads - 1)  # type: ignore[union-attr]
        return layer_looks.attention_view(self._engine, self._state, position, layer, head)

    @uninterrupted
    def norms(self, layer: int | None = None) -> NormsView:
        """Return the norms of what a layer (None: the last one) remembers: K and V by position and
        KV head, latent rows by position, recurrent states at the positions at which they are kept.
        Nothing is computed: what is not in the pool is missing.

        ``InvalidArgument``: no such layer. ``FailedPrecondition``: the session is generating.
        """
        self._open("norms")
        layer, _ = self._known_layer(layer, _remembers)
        return layer_looks.norms_view(self._engine, self._state, layer)

    @uninterrupted
    def compare(self, other: SessionViews, *, top: int = 10) -> ComparisonView:
        """Return where two sessions of one LLM part: the tokens that both begin with, the next
        token of each, and what either side thinks of both.

        ``InvalidArgument``: ``other`` is no session of this LLM. ``FailedPrecondition``: as of
        ``token``, of either.
        """
        check_int("top", top, 1, token_chances.MOST_ALTERNATIVES)
        if not isinstance(other, SessionViews) or not other.belongs_to(self._engine):
            raise InvalidArgument(field="other", given=other, allowed="a session of the same LLM")
        self._open("compare")
        other._open("compare")
        return token_chances.comparison_view(self._engine, self._state, other._state, top, self._names.name_of)

    @uninterrupted
    def tree(self) -> BranchTree:
        """Return the tree of all branches that share a beginning with this session: which tokens
        they share, and where they part. It is drawn in notebooks and terminals, and by its
        ``plot``."""
        state = self._open("tree")
        views = StateViews(self._engine, self._names, "")
        return tree_of(views.history(owner=None), f"the tree of session {state.number}", f"session:{state.number}")

    @uninterrupted
    def heat(
        self,
        *,
        layer: int | None = None,
        head: int | None = None,
        what: str = "attention",
        queries: int | None = None,
    ) -> Heat:
        """Return a heat map of a layer (None: the last one that has it). ``what`` "attention": what
        each of the last ``queries`` (1..1024; None: 64, or as many as are not too large) tokens
        reads of all, by one query head, or on average. "k", "v", "latent" or "state_0": the norms
        of what is held, by position, of one head or of all.

        ``InvalidArgument``: the layer has no such head or ``what``, or the map is too large.
        ``FailedPrecondition``, ``Unsupported``: as of ``attention``, or the tokens' state was
        changed and there is more than one query.
        """
        self._open("heat")
        layer, spec = self._known_layer(layer, _attends if what == "attention" else lambda one: what in _names_of(one))
        names = _names_of(spec)
        if what not in ("attention", *names):
            raise InvalidArgument(field="what", given=what, allowed=" or ".join(map(repr, ("attention", *names))))
        if queries is not None:
            check_int("queries", queries, 1, MOST_QUERIES)
        if what != "attention":
            view = layer_looks.norms_view(self._engine, self._state, layer)
            if head is not None:
                check_int("head", head, 0, view.norms[what].shape[1] - 1)
            return norm_heat(view, what, head)
        layer_looks.require_attention(spec, layer)
        if head is not None:
            check_int("head", head, 0, spec.num_heads - 1)  # type: ignore[union-attr]
        if not len(self):
            raise InvalidArgument("the session is empty; append at least one token to have one that reads")
        return layer_looks.attention_heat(self._engine, self._state, layer, head, queries)

    def _repr_html_(self) -> str:
        return self._summary()._repr_html_()

    def __rich__(self) -> RenderableType:
        return self._summary().__rich__()

    def _summary(self) -> Summary:
        return session_summary(
            self._engine,
            self._state,
            closed=self._closed,
            name=self.name,
            labels=self.labels,
            adapter=self._adapter_name,
        )

    def _adapter_name(self) -> str | None:
        return self.adapter

    def _known_layer(self, layer: int | None, fits: Callable[[LayerSpec], bool]) -> tuple[int, LayerSpec]:
        """Return a layer and its geometry, for None the last one that ``fits``, or just the last;
        ``InvalidArgument`` for another number."""
        last = len(self._engine.runner.model.layer_specs) - 1
        if layer is None:
            found = (one for one in range(last, -1, -1) if fits(self._layer_spec(one)))
            layer = next(found, last)
        check_int("layer", layer, 0, last)
        return layer, self._layer_spec(layer)


def _names_of(spec: LayerSpec) -> tuple[str, ...]:
    """Return the names of what a layer remembers of the session's tokens."""
    return layer_memory.names_of(spec) if spec.kind != "cross" else ()


def _attends(spec: LayerSpec) -> bool:
    return spec.kind not in ("recurrent", "cross")


def _remembers(spec: LayerSpec) -> bool:
    return spec.kind != "cross"
