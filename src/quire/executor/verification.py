"""Verification of several tokens of one sequence in one forward: chains and token trees.

``forward_verify`` and ``speculative_decode`` use it. A verified tree is kept beside its row until
``commit_path`` keeps one path of it; a speculative call keeps a path at once.

Letters: N + 1 tokens or nodes; k draft tokens; R rows of logits; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from quire.base.errors import InvalidArgument, Unsupported
from quire.base.sampling_params import SamplingParams
from quire.base.token_history import Ids
from quire.branches import spare_states
from quire.branches.extension import path_to
from quire.contracts.executor import CacheLike, DecodeInput, DecodeOutput, RequestSampling, SpeculativeOutput
from quire.executor import acceptance
from quire.executor.arguments import (
    CallItem,
    decode_item,
    given_positions,
    naming_item,
    resolve_cache,
    tree_of,
    union,
)
from quire.executor.cache import KVCache
from quire.executor.cache_pool import CachePool
from quire.executor.drafting import verify_drafts
from quire.executor.forward_packing import LOGITS_ONLY, RowOutput, WantedOutputs
from quire.executor.handle import Handle, handle_of
from quire.executor.row_extension import RowExtension, extensions, placed, require_vocabulary
from quire.executor.running_calls import Operation
from quire.executor.transaction import Transaction

PARAMS_OF_A_REQUEST = (
    "a RequestSampling, whose generator and tokens live as long as its request: make one with "
    "quire.executor.request_sampling.ParamsSampling(params, prompt_ids, vocab_size=...) and observe() each token"
)
LOGITS_OF_SPECULATION = "it gives logits only; take hidden states and attention weights from forward_verify"


def checked_items(
    pool: CachePool, inputs: Sequence[DecodeInput], parents: Sequence[int] | None
) -> tuple[list[CallItem], tuple[int, ...] | None]:
    """Check the inputs of ``forward_verify``; return the items and their tree (None: a chain)."""
    tree = None if parents is None else tree_of(parents, len(inputs), "parents")
    items = []
    for index, given in enumerate(inputs):
        with naming_item("forward_verify", index):
            depth = index if tree is None else len(path_to(tree, index)) - 1
            items.append(_item(pool, given, inputs[0], depth))
    return items, tree


def _item(pool: CachePool, given: DecodeInput, first: DecodeInput, depth: int) -> CallItem:
    """Return the item of one input, whose token is ``depth`` after the common start."""
    given.tokens("forward_verify")
    item = decode_item(pool, given.with_position_ids(None), "forward_verify")
    indices = [start + depth for start in item.starts]
    item = replace(item, positions=given_positions(pool, given.position_ids, indices, item.spans, 1))
    cache, starts = resolve_cache(pool, first.kv_cache)
    if item.cache is not cache or item.starts != starts:
        raise InvalidArgument("all inputs must carry the same starting handle, and this one has another")
    if given.adapter != first.adapter:
        raise InvalidArgument(
            f"all inputs must name the same adapter; this one names {given.adapter!r} and the first {first.adapter!r}"
        )
    if item.batch_size != 1:
        raise InvalidArgument(f"a verify belongs to one sequence; the cache has {item.batch_size} rows")
    return item


def verify(
    pool: CachePool, items: Sequence[CallItem], tree: tuple[int, ...] | None, operation: Operation
) -> list[DecodeOutput]:
    """Run checked items. Afterwards a chain is in the cache; a tree is kept beside it.

    If layers are recurrent, a chain runs as a tree of one path if enough slots are free. Then each
    of its tokens has a state, and a cut there runs nothing.
    """
    cache, start = _one_row(items[0])
    ids = np.array([int(item.tokens[0][0]) for item in items], dtype=np.int64)
    cache.commit_chains()
    roomy = tree is None and len(ids) > 1 and spare_states.is_roomy(pool.state, len(ids))
    part = _extension(cache, start, tree, items[0].adapter, [item.positions[0] for item in items])
    with Transaction(pool, [part], operation, on_forks=tree is not None, tree_if_room=roomy) as work:
        opened = tree is None and part.new.parents is not None
        work.replay()
        mark = spare_states.mark(pool.runner, part.seq, part.row.mark) if tree is None else part.row.mark
        if part.seq == part.row.seq:
            part.row.mark = mark
        found = work.run([ids], ["all"], asked=union(item.asked for item in items))[0]
        pending = None
        if opened:
            work.leave_open()
        elif tree is None:
            work.commit()
        else:
            pending = work.set_aside()[0]
    part.row.mark = mark
    outputs = []
    for index, item in enumerate(items):
        depth = index if tree is None else len(path_to(tree, index)) - 1
        handle = Handle(cache, (start + depth + 1,), cache.revision, pending, index if pending else -1)
        keys = start + (len(ids) if tree is not None else index + 1)
        outputs.append(_output(found, index, keys, handle, item.asked))
    return outputs


def _one_row(item: CallItem) -> tuple[KVCache, int]:
    assert item.cache is not None
    return item.cache, item.starts[0]


def _extension(
    cache: KVCache, start: int, parents: tuple[int, ...] | None, adapter: int | None, given: Sequence[Ids | None]
) -> RowExtension:
    """Extend a row by a token for each entry of ``given``, its position or None."""
    part = extensions(cache, [start], [len(given)], adapter=adapter)[0]
    part.new.parents = parents
    part.new.positions = placed(part.row, start, given, range(-1, len(given) - 1) if parents is None else parents)
    return part


def _output(found: RowOutput, index: int, keys: int, handle: Handle, asked: WantedOutputs) -> DecodeOutput:
    weights = None
    if asked.attention_weights:
        weights = tuple(layer[None, :, index : index + 1, :keys].clone() for layer in found.attention_weights)
    return DecodeOutput(
        logits=found.logits_RV[index : index + 1],
        kv_cache=handle,
        hidden_state=found.hidden_states[-1][index : index + 1].clone() if asked.hidden_states else None,
        attention_weights=weights,
    )


def commit_path(pool: CachePool, handle: CacheLike) -> Handle:
    """Keep the path to a node of a verified tree."""
    if not isinstance(handle, Handle) or handle.pending is None:
        raise InvalidArgument(
            "commit_path takes a handle of forward_verify with parents, which ends in a node of its tree; got "
            f"{'another handle' if isinstance(handle, Handle) else type(handle).__name__}"
        )
    if handle.cache.pool is not pool:
        raise InvalidArgument(f"KV cache {handle.cache_id} belongs to another executor")
    handle.require_valid()
    handle.cache.keep_path(handle.cache.rows[0], handle.node)
    return handle_of(handle.cache)


@dataclass(frozen=True, slots=True, eq=False)
class Speculated:
    """One checked speculative call of a sequence."""

    item: CallItem
    drafts: list[int]
    parents: tuple[int, ...] | None
    draft_kV: Tensor | None
    sampling: RequestSampling | None

    @property
    def tokens(self) -> Ids:
        """The input token and the drafts behind it."""
        return np.array([int(self.item.tokens[0][0]), *self.drafts], dtype=np.int64)

    def accept(self, logits_RV: Tensor, threshold: float) -> acceptance.AcceptResult:
        """Return the accepted part of the drafts."""
        if self.sampling is None:
            return acceptance.accept_by_threshold(logits_RV, self.drafts, threshold, self.parents)
        return acceptance.rejection_sample(logits_RV, self.drafts, self.draft_kV, self.sampling, self.parents)

    def extension(self, count: int, *, chain: bool) -> RowExtension:
        """Return the extension by the first ``count`` tokens. ``chain``: not as a tree."""
        # The input token is node 0, draft i is node i + 1.
        tree = None if self.parents is None else (-1, *(parent + 1 for parent in self.parents))
        if tree is None and not chain:
            tree = tuple(range(-1, count - 1))
        cache, start = _one_row(self.item)
        return _extension(cache, start, tree, self.item.adapter, [self.item.positions[0], *([None] * (count - 1))])


def checked_speculation(
    pool: CachePool,
    item: CallItem,
    draft_tokens: Sequence[int],
    *,
    certain: bool,
    draft_probabilities: Tensor | None,
    sampling: RequestSampling | SamplingParams | None,
    draft_parents: Sequence[int] | None,
) -> Speculated:
    """Check the drafts of one sequence. ``certain``: they were not drawn from probabilities, but
    will be the proposer's."""
    if isinstance(sampling, SamplingParams):
        raise InvalidArgument(f"speculative_decode: sampling must be {PARAMS_OF_A_REQUEST}; got SamplingParams")
    if item.asked != LOGITS_ONLY:
        raise Unsupported(f"speculative_decode: {LOGITS_OF_SPECULATION}")
    if item.batch_size != 1:
        raise InvalidArgument(f"speculation is for one sequence; the cache has {item.batch_size} rows")
    for name, value in (("draft_probabilities", draft_probabilities), ("draft_parents", draft_parents)):
        if certain and value is not None:
            raise InvalidArgument(
                f"speculative_decode: {name} belong to draft_tokens, and without these the executor's own proposer "
                "drafts; give both or neither",
                field=name,
            )
    drafts = list(draft_tokens)
    require_vocabulary(np.array(drafts, dtype=object), pool.facts.vocab_size, "draft_tokens")
    parents = None if draft_parents is None else tree_of(draft_parents, len(drafts), "draft_parents")
    if not certain and (draft_probabilities is None) != (sampling is None):
        raise InvalidArgument(
            "exact mode takes draft_probabilities and sampling together; the threshold rule takes neither"
        )
    draft_kV = None
    if draft_probabilities is not None:
        draft_kV = acceptance.check_draft_probabilities(draft_probabilities, drafts, pool.facts.vocab_size)
    return Speculated(item, drafts, parents, draft_kV, sampling)


def speculate(
    pool: CachePool, calls: Sequence[Speculated], acceptance_threshold: float, operation: Operation
) -> list[SpeculativeOutput]:
    """Run checked calls in one forward; see ``ModelExecutor.speculative_decode``."""
    chains = all(call.parents is None for call in calls)
    rows, found = verify_drafts(
        pool,
        lambda counts: [call.extension(count, chain=chains) for call, count in zip(calls, counts, strict=True)],
        [call.tokens for call in calls],
        lambda rows: [call.accept(rows_RV, acceptance_threshold) for call, rows_RV in zip(calls, rows, strict=True)],
        operation,
    )
    return [
        SpeculativeOutput(
            accepted_tokens=tuple(call.drafts[index] for index in result.path),
            next_logits=rows_RV[result.row : result.row + 1].clone(),
            kv_cache=handle_of(_one_row(call.item)[0]),
            next_probs=result.next_probs,
        )
        for call, rows_RV, result in zip(calls, rows, found, strict=True)
    ]
