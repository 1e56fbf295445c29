"""``ContractState``: the published contract of a KV state, for callers outside of Quire.

A face over ``State``, a line a verb. Guards stand here: each verb checks the types of its arguments
(``signatures``), and a signal takes effect before or after a change (``interrupts``). Quire's own
rooms hold a ``State``, and run its layers by the pass that ``begin_forward`` opens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from quire.base.interrupts import uninterrupted
from quire.base.signatures import checked
from quire.contracts.pool_verbs import PoolFacts, StateGeometry
from quire.kv import attention_verbs, recurrent_verbs
from quire.kv.state import State

P = ParamSpec("P")
R = TypeVar("R")


def verb(function: Callable[Concatenate[State, P], R]) -> Callable[Concatenate[ContractState, P], R]:
    """Return a verb of the face: it checks its arguments and calls ``function`` of the state."""
    guarded = checked(function, function.__name__)

    @wraps(function)
    def call(face: ContractState, /, *args: P.args, **kwargs: P.kwargs) -> R:
        found: R = guarded(face.state, *args, **kwargs)
        return found

    return call


def change(function: Callable[Concatenate[State, P], R]) -> Callable[Concatenate[ContractState, P], R]:
    """Return a verb that signals do not interrupt."""
    return uninterrupted(verb(function))


def fact(name: str) -> Any:
    """Return a property with the value that the state has."""
    return property(lambda face: getattr(face.state, name))


class ContractState:
    """A state as ``contracts.kv_state.AttentionKVCache`` and ``RNNState`` describe it, with the
    verbs of ``ModelState`` too. One thread at a time."""

    def __init__(self, state: State) -> None:
        """Give ``state`` to callers outside."""
        self.state = state
        self.dtype, self.device, self.page_size = state.dtype, state.device, state.page_size

    open_pass = verb(State.open_pass)

    # -- sequences ---------------------------------------------------------------------------------

    clear = change(State.clear)
    add_sequence = change(State.add_sequence)
    remove_sequence = change(State.remove_sequence)
    fork_sequence = change(State.fork_sequence)
    popn = change(State.popn)
    rewind_cost = verb(State.rewind_cost)
    reachable = verb(State.reachable)
    nearest_reachable = verb(State.nearest_reachable)
    enable_sliding_window_for_seq = change(State.enable_sliding_window_for_seq)
    commit_accepted_token_tree_nodes = change(State.commit_accepted_token_tree_nodes)
    check = verb(State.check)

    # -- forward -----------------------------------------------------------------------------------

    begin_forward = change(State.begin_forward)
    end_forward = change(State.end_forward)
    abort_forward = change(State.abort_forward)
    get_query_positions = verb(State.get_query_positions)

    # -- kept recurrent states ---------------------------------------------------------------------

    checkpoint = change(State.checkpoint)
    checkpoints = verb(State.checkpoints)
    drop_checkpoint = change(State.drop_checkpoint)
    kept_positions = verb(State.kept_positions)
    loose_checkpoints = verb(State.loose_checkpoints)

    # -- stored rows and states --------------------------------------------------------------------

    set_cross_kv = change(State.set_cross_kv)
    debug_get_kv = verb(State.debug_get_kv)
    debug_get_kv_mla = verb(State.debug_get_kv_mla)
    debug_set_kv = change(State.debug_set_kv)
    debug_get = verb(State.debug_get)
    debug_set = change(State.debug_set)

    # -- export and import -------------------------------------------------------------------------

    get_layout = verb(State.get_layout)
    get_layout_hash = verb(State.get_layout_hash)
    get_checkpoint_metadata = verb(State.get_checkpoint_metadata)
    export_page_group = verb(State.export_page_group)
    open_export = verb(State.open_export)
    plan_import = verb(State.plan_import)
    import_metadata = verb(State.import_metadata)
    import_need = verb(State.import_need)
    prepare_import = change(State.prepare_import)
    import_page_group = change(State.import_page_group)
    import_rows = change(State.import_rows)
    pending_layers = verb(State.pending_layers)
    publish_import = change(State.publish_import)
    finish_import = change(State.finish_import)

    # -- hand-over ---------------------------------------------------------------------------------

    disagg_prepare_recv = change(State.disagg_prepare_recv)
    disagg_mark_send = change(State.disagg_mark_send)
    disagg_receive = verb(State.disagg_receive)
    disagg_wait = change(State.disagg_wait)
    disagg_cancel = change(State.disagg_cancel)

    # -- layers ------------------------------------------------------------------------------------

    recurrent_ids: tuple[int, ...] = fact("recurrent_ids")
    layer_spec = verb(State.layer_spec)
    own_spec = verb(State.own_spec)
    geometry: StateGeometry = fact("geometry")
    unfused_layers = verb(State.unfused_layers)
    forgets: bool = fact("forgets")
    endless: bool = fact("endless")

    # -- sizes -------------------------------------------------------------------------------------

    num_bytes: int = fact("num_bytes")
    num_pages: int = fact("num_pages")
    num_used_pages: int = fact("num_used_pages")
    num_used_bytes: int = fact("num_used_bytes")
    num_splits: int = fact("num_splits")
    capacity: int | None = fact("capacity")
    pool_sizes = verb(State.pool_sizes)
    pool_facts: tuple[PoolFacts, ...] = fact("pool_facts")
    page_references = verb(State.page_references)

    # -- holdings of sequences ---------------------------------------------------------------------

    empty = verb(State.empty)
    forward_is_open: bool = fact("forward_is_open")
    has_sequence = verb(State.has_sequence)
    sequence_ids = verb(State.sequence_ids)
    sequence_length = verb(State.sequence_length)
    cached_length = verb(State.cached_length)
    pending_nodes = verb(State.pending_nodes)
    total_sequence_length = verb(State.total_sequence_length)
    window = verb(State.window)
    held = verb(State.held)
    held_pages = verb(State.held_pages)
    page_table = verb(State.page_table)
    sequence_use = verb(State.sequence_use)
    sequence_pages = verb(State.sequence_pages)
    sequence_states = verb(State.sequence_states)
    num_shared_pages = verb(State.num_shared_pages)
    num_needed = verb(State.num_needed)
    pages_held = verb(State.pages_held)

    # -- room --------------------------------------------------------------------------------------

    num_available_pages = verb(State.num_available_pages)
    missing_pages = verb(State.missing_pages)
    page_shortage = verb(State.page_shortage)
    full_page_shortage = verb(State.full_page_shortage)
    shortage_in_steps = verb(State.shortage_in_steps)
    free_pages = verb(State.free_pages)
    shares_tail = verb(State.shares_tail)
    pages_freed = verb(State.pages_freed)
    pages_at_most = verb(State.pages_at_most)
    largest_step = verb(State.largest_step)
    states_freed = verb(State.states_freed)
    num_available_states: int = fact("num_available_states")
    num_free_states: int = fact("num_free_states")
    num_checkpoints: int = fact("num_checkpoints")
    spare_states = verb(State.spare_states)

    # -- attention in a forward --------------------------------------------------------------------

    attention_with_fused_qkv = verb(attention_verbs.attention_with_fused_qkv)
    append_kv = verb(attention_verbs.append_kv)
    append_mla_kv = verb(attention_verbs.append_mla_kv)
    self_attention = verb(attention_verbs.self_attention)
    cross_attention = verb(attention_verbs.cross_attention)
    attention_with_shared_kv = verb(attention_verbs.attention_with_shared_kv)
    merge = verb(attention_verbs.merge)
    merge_attn_output_inplace = verb(attention_verbs.merge_attn_output_inplace)

    # -- recurrent states in a forward -------------------------------------------------------------

    get = verb(recurrent_verbs.get)
    set = change(recurrent_verbs.set)
    linear_attention = verb(recurrent_verbs.linear_attention)
