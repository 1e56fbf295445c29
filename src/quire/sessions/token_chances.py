"""How probable tokens are at a position of a session, and where two sessions part.

Letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.base.errors import QuireError
from quire.base.token_history import common_prefix
from quire.branches.session_branch import SessionBranch
from quire.contracts.token_views import ChancesView, ComparisonView, MaskView, PartingSide, StopView, TokenChance
from quire.engine.engine import Engine
from quire.sampling.generations import ended_at, generation_at
from quire.sessions.token_run import TokenRun, require_idle, run_token

MOST_ALTERNATIVES = 100


class Chances:
    """The distribution of a token after some state."""

    def __init__(self, engine: Engine, logits_V: Tensor) -> None:
        """Take float32 logits. ``QuireError`` if some are NaN."""
        self._engine = engine
        self.logprobs_V = torch.log_softmax(logits_V.double().cpu(), -1)
        if bool(self.logprobs_V.isnan().any()):
            raise QuireError("the logits after these tokens are not finite, so that no token has a probability")

    def of(self, token: int) -> TokenChance:
        found = self.logprobs_V[token]
        rank = int((self.logprobs_V > found).sum()) + int((self.logprobs_V[:token] == found).sum()) + 1
        return TokenChance(token, text_of(self._engine, token), float(found), rank)

    def top(self, count: int) -> tuple[TokenChance, ...]:
        """Return the most probable tokens, by rank."""
        order = torch.sort(self.logprobs_V, descending=True, stable=True).indices[:count].tolist()
        return tuple(
            TokenChance(token, text_of(self._engine, token), float(self.logprobs_V[token]), rank)
            for rank, token in enumerate(order, 1)
        )

    @property
    def entropy(self) -> float:
        """In nats."""
        return float(torch.special.entr(self.logprobs_V.exp()).sum())

    def divergence(self, other: Chances) -> float:
        """Return KL(self || other), in nats."""
        p_V = self.logprobs_V.exp()
        terms_V = torch.where(p_V > 0, p_V * (self.logprobs_V - other.logprobs_V), torch.zeros_like(p_V))
        return max(0.0, float(terms_V.sum()))


def text_of(engine: Engine, token: int) -> str | None:
    """Return the text of one token; None without a tokenizer, and for an embedding."""
    return None if engine.tokenizer is None or token < 0 else engine.tokenizer.token_text(token)


def token_view(engine: Engine, source: SessionBranch, position: int, top: int) -> ChancesView:
    """Return the view of the token at a position, of 0..the number of tokens. Errors: as for
    ``run_token``."""
    with engine.lock:
        require_idle(source, "token")
        ids, generations = source.tokens.ids.copy(), source.generations
        given = source.tokens.media.as_given(ids[position : position + 1])
        logits_V = source.logits if position == ids.size and ids.size else None
        exact = not source.modified and source.origin.exact_part(position) == position
    run: TokenRun | None = None
    if position and logits_V is None:
        run = run_token(engine, source, position - 1, "token")
        logits_V, exact = run.logits_V, run.exact
    chances = None if logits_V is None else Chances(engine, logits_V)
    token = given[0] if given else None
    made = generation_at(generations, position)
    ended = ended_at(generations, position)
    masked = next((one for one in (made, ended) if one is not None and one.mask), None)
    return ChancesView(
        position=position,
        num_tokens=ids.size,
        vocab_size=engine.runner.model.vocab_size,
        token=None if chances is None or token is None or token < 0 else chances.of(token),
        id=token,
        text=None if token is None else text_of(engine, token),
        alternatives=() if chances is None else chances.top(top),
        entropy=None if chances is None else chances.entropy,
        computed=run is not None,
        num_run=0 if run is None else run.num_run,
        exact=exact,
        generated=made is not None,
        mask=None if masked is None else MaskView(masked.mask, masked.allowed_at(position)),
        stop=None if ended is None else StopView(ended.finish_reason, ended.stop_reason, ended.start),
    )


def comparison_view(
    engine: Engine, a: SessionBranch, b: SessionBranch, top: int, name_of: Callable[[int], str | None]
) -> ComparisonView:
    """Return the comparison of two sessions. Errors: as for ``run_token``. ``name_of`` names
    adapters by their ids."""
    sides = (a, b)
    with engine.lock:
        for one in sides:
            require_idle(one, "compare")
        ids = [one.tokens.ids.copy() for one in sides]
        shared = common_prefix(*ids)
        following = [one.tokens.media.as_given(one.tokens.ids[shared : shared + 1]) for one in sides]
        adapters = [one.runs.at(shared - 1) if shared else None for one in sides]
        names = [None if adapter is None else name_of(adapter) for adapter in adapters]
    runs = [run_token(engine, one, shared - 1, "compare") for one in sides] if shared else []
    chances = [Chances(engine, run.logits_V) for run in runs]

    def side(index: int) -> PartingSide:
        token, other = (following[one][0] if following[one] else None for one in (index, 1 - index))
        found = chances[index] if chances else None
        return PartingSide(
            num_tokens=ids[index].size,
            token=None if found is None or token is None or token < 0 else found.of(token),
            id=token,
            text=None if token is None else text_of(engine, token),
            other=None if found is None or other is None or other < 0 else found.of(other),
            alternatives=() if found is None else found.top(top),
            entropy=None if found is None else found.entropy,
            exact=runs[index].exact if runs else True,
            adapter=names[index],
        )

    return ComparisonView(
        shared=shared,
        a=side(0),
        b=side(1),
        divergences=None if not chances else (chances[0].divergence(chances[1]), chances[1].divergence(chances[0])),
        num_run=sum(run.num_run for run in runs),
    )
