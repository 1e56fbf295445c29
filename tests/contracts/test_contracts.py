"""The published contracts: every verb is there, with its signature, its types and its
documentation.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

from quire.contracts import executor, kv_cache, kv_state

SIGNATURES: dict[type, dict[str, str]] = {
    kv_state.KVState: {
        "clear": "",
        "add_sequence": "seq_id",
        "remove_sequence": "seq_id",
        "fork_sequence": "parent_id, child_id, fork_pos=-1, *, exact=False",
        "popn": "seq_id, n, *, exact=False",
        "rewind_cost": "seq_id, pos",
        "reachable": "seq_id",
        "enable_sliding_window_for_seq": "seq_id, window, sink=0, *, eviction='token'",
        "empty": "",
        "num_available_pages": "",
        "missing_pages": "seq_ids, append_lengths, token_tree_parents=None",
        "sequence_length": "seq_id",
        "cached_length": "seq_id",
        "pending_nodes": "seq_id",
        "total_sequence_length": "",
        "check": "",
        "begin_forward": "seq_ids, append_lengths, token_tree_parents=None, *, checkpoints=()",
        "end_forward": "*, skipped=()",
        "abort_forward": "",
        "get_query_positions": "*, relative=False",
        "commit_accepted_token_tree_nodes": "seq_ids, leaf_indices",
        "checkpoint": "seq_id",
        "checkpoints": "seq_id",
        "drop_checkpoint": "seq_id, position",
        "get_checkpoint_metadata": "seq_id, *, checksums=True",
        "get_layout": "",
        "get_layout_hash": "",
        "plan_import": "metadata",
        "export_page_group": "seq_id, group, out=None",
        "prepare_import": "seq_id, metadata, *, parent=None, shared=0",
        "import_metadata": "length, *, kept=()",
        "import_need": "metadata, *, shared=0",
        "import_page_group": "seq_id, group, tensors",
        "import_rows": "seq_id, group, start, rows",
        "pending_layers": "seq_id",
        "publish_import": "seq_id",
        "open_export": "seq_id",
        "finish_import": "seq_id",
        "disagg_prepare_recv": "seq_id, length, *, channel",
        "disagg_mark_send": "seq_id, begin, compressed_remote_position_map, receiver",
        "disagg_receive": "seq_id, timeout=None",
        "disagg_wait": "seq_id, timeout=None",
        "disagg_cancel": "seq_id",
    },
    kv_state.AttentionVerbs: {
        "attention_with_fused_qkv": "layer_id, qkv, *, sm_scale=None, mask=None, out=None",
        "append_kv": "layer_id, k, v",
        "append_mla_kv": "layer_id, kv",
        "self_attention": "layer_id, q, k, v, *, sm_scale=None, mask=None, out=None",
        "cross_attention": "layer_id, q, *, scope='past', sm_scale=None, out=None",
        "attention_with_shared_kv": "source_layer_id, q, k=None, v=None, *, sm_scale=None, out=None",
        "merge_attn_output_inplace": "o1, lse1, o2, lse2",
        "merge": "o1, lse1, o2, lse2",
    },
    kv_state.StoredRows: {
        "set_cross_kv": "layer_id, seq_id, k, v",
        "debug_get_kv": "seq_id, start=0, end=None, *, layer=None, relative=False, out=None",
        "debug_get_kv_mla": "seq_id, start=0, end=None, *, layer=None, relative=False, out=None",
        "debug_set_kv": "seq_id, start, k, v=None, *, layer=None",
    },
    kv_state.RecurrentVerbs: {
        "get": "layer_id, state_id, *, per_token=False, out=None",
        "set": "layer_id, state_id, data, *, per_token=False",
        "linear_attention": "layer_id, q, k, v, *, sm_scale=1.0, log_decay=None, beta=None, out=None",
    },
    kv_state.StoredStates: {
        "debug_get": "layer_id, state_id, seq_id, *, position=None",
        "debug_set": "layer_id, state_id, seq_id, data",
    },
    kv_cache.KVCacheInterface: {
        "num_entries": "property",
        "batch_size": "property",
        "length": "property",
        "lengths": "property",
        "serialize": "",
        "load": "data, *, convert_dtype=False",
        "select_and_copy_from": "other, b",
        "broadcast_and_copy_from": "other",
        "deep_copy": "",
        "contains": "name",
        "clear": "",
        "resize": "n",
    },
    kv_cache.CacheHandle: {
        **dict.fromkeys(
            (
                "cache_id",
                "sequence_length",
                "num_tokens",
                "revision",
                "block_table",
                "device",
                "num_layers",
                "num_heads",
                "head_dim",
                "stats",
                "is_valid",
            ),
            "property",
        ),
        "key_cache": "layer",
        "value_cache": "layer",
        "clone_handle": "",
    },
    executor.ExecutorBase: {
        "create_kv_cache": "*, batch_size=1, capacity=None, dynamic=False",
        "load_lora": "assets",
        "unload_lora": "lora_id",
        "cancel": "",
    },
    executor.LlmExecutorInterface: {
        "prefill": "inputs, kv_cache, lora_id=None",
        "step": "inputs, kv_cache, lora_id=None",
        "sample_tokens": "num_steps, inputs, kv_cache, lora_id=None, *, sampling=None",
        "sample_tokens_batch": "num_steps, inputs, kv_cache, lora_id=None, *, sampling=None",
    },
    executor.ModelExecutor: {
        "prefill": "input",
        "decode": "input",
        "batch_prefill": "inputs",
        "batch_decode": "inputs",
        "forward": "input_ids",
        "forward_verify": "inputs, *, parents=None",
        "commit_path": "handle",
        "truncate_kv": "handle, new_len",
        "speculative_decode": (
            "input, draft_tokens, acceptance_threshold, *, draft_probabilities=None, sampling=None, draft_parents=None"
        ),
        "batch_speculative_decode": (
            "inputs, draft_tokens, acceptance_threshold, *, draft_probabilities=None, sampling=None, draft_parents=None"
        ),
        "release_cache": "cache_id",
        "capabilities": "",
        "status": "",
        "metrics": "",
        "info": "",
        "warmup": "",
        "shutdown": "",
        "supports_batch_size": "batch_size, sequence_length=1",
        "optimal_batch_size": "sequence_length=1",
    },
    executor.RequestSampling: {"probabilities": "logits_RV, drafted", "uniform": ""},
    executor.ExecutorFactory: {
        "create_executor": "config",
        "create_batch_executor": "config",
        "validate_config": "config",
        "supported_types": "",
    },
    executor.ExecutorRegistry: {
        "register": "name, executor",
        "get": "name",
        "remove": "name",
        "list_names": "",
        "get_metrics": "name",
    },
}
"""Each Protocol's own members: parameters without ``self`` and types, or ``property``."""

VERBS_BY_SYSTEM: dict[type, str] = {
    kv_state.KVState: """clear add_sequence remove_sequence fork_sequence popn begin_forward end_forward
        enable_sliding_window_for_seq commit_accepted_token_tree_nodes empty num_available_pages total_sequence_length
        get_query_positions""",
    kv_state.AttentionKVCache: """enable_sliding_window_for_seq commit_accepted_token_tree_nodes get_query_positions
        attention_with_fused_qkv self_attention cross_attention append_mla_kv merge_attn_output_inplace
        debug_get_kv debug_get_kv_mla debug_set_kv begin_forward""",
    kv_state.RNNState: "get set debug_get linear_attention begin_forward popn checkpoint",
    kv_cache.KVCacheInterface: """num_entries batch_size serialize load select_and_copy_from broadcast_and_copy_from
        deep_copy clear""",
    executor.LlmExecutorInterface: "create_kv_cache prefill step sample_tokens load_lora unload_lora cancel",
    executor.ModelExecutor: """create_kv_cache prefill decode batch_prefill batch_decode forward forward_verify truncate_kv
        speculative_decode release_cache load_lora unload_lora cancel capabilities status metrics warmup shutdown
        optimal_batch_size supports_batch_size info""",
    executor.ExecutorFactory: "create_executor create_batch_executor validate_config supported_types",
    executor.ExecutorRegistry: "register get remove list_names get_metrics",
}
"""What a reader who knows the original system looks for, on the Protocol on which they look for it.
"""


def own_members(protocol: type) -> dict[str, Any]:
    return {
        name: member
        for name, member in vars(protocol).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    }


def rendered(member: Any) -> str:
    """Names, kinds and defaults of a verb's parameters, without self and types."""
    if isinstance(member, property):
        return "property"
    parts: list[str] = []
    starred = False
    for parameter in list(inspect.signature(member).parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parts.append(parameter.name + default)
    return ", ".join(parts)


@pytest.mark.parametrize("protocol", SIGNATURES, ids=lambda p: p.__name__)
def test_signatures(protocol: type) -> None:
    assert {name: rendered(member) for name, member in own_members(protocol).items()} == SIGNATURES[protocol]


@pytest.mark.parametrize(
    ("protocol", "verb"),
    [(protocol, verb) for protocol, verbs in VERBS_BY_SYSTEM.items() for verb in verbs.split()],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_known_verbs_are_where_a_reader_looks(protocol: type, verb: str) -> None:
    doc = inspect.getdoc(getattr(protocol, verb)) or ""
    assert len(doc) >= 40, f"{protocol.__name__}.{verb} says too little: {doc!r}"


@pytest.mark.parametrize("protocol", SIGNATURES, ids=lambda p: p.__name__)
def test_every_member_and_return_is_documented_and_typed(protocol: type) -> None:
    members = own_members(protocol)
    assert members
    for name, member in members.items():
        function: Any = member.fget if isinstance(member, property) else member
        assert len((inspect.getdoc(member) or "").split()) >= 3, f"{protocol.__name__}.{name}"
        untyped = [p.name for p in inspect.signature(function).parameters.values() if p.annotation is p.empty][1:]
        assert not untyped, f"{protocol.__name__}.{name}: {untyped}"
        assert inspect.signature(function).return_annotation is not inspect.Signature.empty


def test_a_scheduler_may_import_state_contracts_without_torch() -> None:
    code = "import sys, quire.contracts.kv_state, quire.contracts.kv_cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
