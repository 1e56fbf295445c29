"""What a session shows of its tokens: chances, attention, norms, and where another one parts."""

from __future__ import annotations

from quire.config import check_int
from quire.contracts.layers import LayerSpec
from quire.contracts.token_views import AttentionView, ChancesView, ComparisonView, NormsView
from quire.engine.state_access import StateAccess
from quire.engine.views import layer_looks, token_chances
from quire.errors import InvalidArgument
from quire.interrupts import uninterrupted


class SessionViews(StateAccess):
    """A live sequence that can be looked at. Looking changes nothing. What must be computed runs on
    a fork, which is gone afterwards. State that was written into, blended or converted is read as
    it is."""

    @uninterrupted
    def token(self, position: int, *, top: int = 10) -> ChancesView:
        """Return what the model thinks of the token at ``position``, after those before it: its
        probability and rank, the ``top`` most probable tokens (1..100), and which mask and which
        stop are noted there. At ``len(session)`` the token that comes next is meant.

        ``InvalidArgument``: no such position. ``FailedPrecondition``: the session is generating, or
        the state before was changed and would have to be computed again.
        """
        check_int("top", top, 1, token_chances.MOST_ALTERNATIVES)
        self._open("token")
        check_int("position", position, 0, len(self))
        return token_chances.token_view(self._engine, self._state, position, top)

    @uninterrupted
    def attention(self, position: int, layer: int, head: int | None = None) -> AttentionView:
        """Return what the token at ``position`` reads at a layer: the weights, float32, of its
        query over all positions up to its own, of one query head or of all.

        Its own row is computed anew, like that of the last token before a generation.
        ``InvalidArgument``: no such position, layer or head. ``Unsupported``: the layer has no
        attention over tokens. ``FailedPrecondition``: as of ``token``.
        """
        self._open("attention")
        if not len(self):
            raise InvalidArgument("the session is empty; append at least one token to have one that reads")
        check_int("position", position, 0, len(self) - 1)
        spec = self._known_layer(layer)
        layer_looks.require_attention(spec, layer)
        if head is not None:
            check_int("head", head, 0, spec.num_heads - 1)  # type: ignore[union-attr]
        return layer_looks.attention_view(self._engine, self._state, position, layer, head)

    @uninterrupted
    def norms(self, layer: int) -> NormsView:
        """Return the norms of what a layer remembers: K and V by position and KV head, latent rows
        by position, recurrent states at the positions at which they are kept. Nothing is computed:
        what is not in the pool is missing.

        ``InvalidArgument``: no such layer. ``FailedPrecondition``: the session is generating.
        """
        self._open("norms")
        self._known_layer(layer)
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

    def _known_layer(self, layer: int) -> LayerSpec:
        """Return a layer's geometry; ``InvalidArgument`` for another number."""
        layers = len(self._engine.runner.model.layer_specs)
        check_int("layer", layer, 0, layers - 1)
        return self._layer_spec(layer)
