"""What tries everything that users call on an executor and its KV caches, on a model of each
combination of layers (``rule_uses``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from tests.executor.conftest import inputs, prompt, token
from tests.rule_beds import PROMPT, Bed, causal_mask, keeping, refused
from tests.small_llms import CONTEXT, Checkpoint, random_tokens

from quire.contracts.executor import VISION_PLACEHOLDER, ExecutorInputs, ModelAssets, TextData, VisionData
from quire.executor.llm_executor import LlmExecutor


def executor_runs(bed: Bed) -> None:
    executor = bed.llm.executor
    output = executor.prefill(prompt(PROMPT))
    run, handle = list(PROMPT), output.kv_cache
    for step in range(3):
        following = executor.decode(token(handle, step))
        run.append(step)
        bed.rows(following.logits[0][None], run, len(run) - 1)
        handle = following.kv_cache
    handle.cache.clear()


def executor_batches(bed: Bed) -> None:
    """Of different lengths, together; the whole of a batch without a cache."""
    executor, other = bed.llm.executor, random_tokens(11, seed=2)
    outputs = executor.batch_prefill([prompt(PROMPT), prompt(other)])
    following = executor.batch_decode([token(output.kv_cache, 5) for output in outputs])
    for given, output in zip((PROMPT, other), following, strict=True):
        bed.rows(output.logits[0][None], [*given, 5], len(given))
    bed.rows(executor.forward(torch.tensor([PROMPT, PROMPT[::-1]]))[1][-1:], PROMPT[::-1], len(PROMPT) - 1)


def executor_samples(bed: Bed) -> None:
    llm = LlmExecutor(bed.llm.executor)
    one, two = llm.create_kv_cache(dynamic=True), llm.create_kv_cache(batch_size=2, dynamic=True)
    llm.prefill(inputs(PROMPT), one)
    found = llm.sample_tokens(4, inputs([5]), one)
    assert bed.checkpoint.continues([*PROMPT, 5], found)
    llm.prefill(inputs(PROMPT, PROMPT), two)
    for first, row in zip((5, 6), llm.sample_tokens_batch(4, inputs([5], [6]), two), strict=True):
        assert bed.checkpoint.continues([*PROMPT, first], row)
    step = llm.step(inputs([7]), one)
    bed.rows(step.reshape(1, -1), [*PROMPT, 5, *found[:-1], 7], len(PROMPT) + 4)


def executor_positions(bed: Bed) -> None:
    """Anywhere: what transformers gives there, prompt and decode; a mask keeps it from taking jumps
    for borders of texts.
    """
    executor, ids, checkpoint = bed.llm.executor, [*PROMPT, 5], bed.checkpoint
    checkpoint.exact_logits(ids)
    places = torch.tensor([[*range(9), *range(100, 100 + len(PROMPT) - 9), 50]])
    given = {"attention_mask": torch.ones_like(places), "position_ids": places}
    with torch.inference_mode():
        exact_TV = checkpoint.exact(torch.tensor([ids]), **given).logits[0]
        error = float((checkpoint.model(torch.tensor([ids]), **given).logits[0] - exact_TV).abs().max())
    output = executor.prefill(prompt(PROMPT, position_ids=places[:, :-1]))
    last = executor.decode(token(output.kv_cache, 5, position_ids=places[:, -1:])).logits
    bound = error + checkpoint.tolerance * float(exact_TV.abs().max())
    assert float((torch.cat((output.logits[0], last)) - exact_TV).abs().max()) <= bound


def refused_positions(bed: Bed, reason: str) -> None:
    executor, places = bed.llm.executor, torch.arange(len(PROMPT))[None]
    refused(bed, lambda: executor.prefill(prompt(PROMPT, position_ids=places + 1)), reason)
    bed.rows(executor.prefill(prompt(PROMPT, position_ids=places)).logits[0], PROMPT, 0)


def executor_truncates(bed: Bed) -> None:
    executor = bed.llm.executor
    for length in (29, 20, 7, 1):
        handle = executor.prefill(prompt(PROMPT)).kv_cache
        cut = executor.truncate_kv(handle, length)
        found = executor.decode(token(cut, 5)).logits[0]
        bed.rows(found[None], [*PROMPT[:length], 5], length)


def executor_verifies(bed: Bed) -> None:
    executor = bed.llm.executor
    parents, nodes = (-1, 0, 0, 1), random_tokens(4, seed=5)
    start = executor.prefill(prompt(PROMPT)).kv_cache
    outputs = executor.forward_verify([token(start, node) for node in nodes], parents=parents)
    for path, output in zip(([0], [0, 1], [0, 2], [0, 1, 3]), outputs, strict=True):
        tokens = [*PROMPT, *(nodes[node] for node in path)]
        bed.rows(output.logits[0][None], tokens, len(tokens) - 1)
    kept = executor.commit_path(outputs[3].kv_cache)
    tokens = [*PROMPT, nodes[0], nodes[1], nodes[3], 9]
    bed.rows(executor.decode(token(kept, 9)).logits[0][None], tokens, len(tokens) - 1)


def executor_speculates(bed: Bed) -> None:
    executor = bed.llm.executor
    best = bed.checkpoint.greedy([*PROMPT, 5], 4)
    for drafts, accepted in ((best, 4), ([*best[:2], (best[2] + 1) % 97, best[3]], 2), ([(best[0] + 1) % 97], 0)):
        handle = executor.prefill(prompt(PROMPT)).kv_cache
        output = executor.speculative_decode(token(handle, 5), drafts, 1.0)
        assert output.accepted_tokens == tuple(drafts[:accepted])
        again = token(executor.prefill(prompt(PROMPT)).kv_cache, 5)
        (same,) = executor.batch_speculative_decode([again], [drafts], 1.0)
        assert same.accepted_tokens == output.accepted_tokens
        run = [*PROMPT, 5, *drafts[:accepted], 9]
        bed.rows(executor.decode(token(output.kv_cache, 9)).logits[0][None], run, len(run) - 1)


def executor_copies(bed: Bed) -> None:
    """Candidates: a prompt for two rows, each goes its way, one is taken back; copies go on by
    themselves.
    """
    executor = bed.llm.executor
    handle = executor.prefill(prompt(PROMPT)).kv_cache
    two = executor.create_kv_cache(batch_size=2, capacity=handle.cache.num_entries)
    two.broadcast_and_copy_from(handle.cache)
    output = executor.decode(token(two, 5, 6))
    for row, first in enumerate((5, 6)):
        bed.rows(output.logits[row][None], [*PROMPT, first], len(PROMPT))
    copies = handle.clone_handle(), handle.cache.deep_copy()
    handle.cache.select_and_copy_from(two, 1)
    for cache, tokens in ((handle.cache, [*PROMPT, 6]), *((copy, PROMPT) for copy in copies)):
        bed.rows(executor.decode(token(cache, 9)).logits[0][None], [*tokens, 9], len(tokens))


def executor_rows(bed: Bed) -> None:
    layer = keeping(bed)
    handle = bed.llm.executor.prefill(prompt(PROMPT)).kv_cache
    k, v = handle.key_cache(layer), handle.value_cache(layer)
    with bed.sequence() as seq:
        bed.run(seq, PROMPT)
        (held,) = bed.state.held(seq, layer)
        rows = bed.state.debug_get_kv(seq, held.start, held.stop, layer=layer)
    for mine, other in zip((k, v), rows, strict=True):
        bed.checkpoint.assert_same_memory(mine[0, held.start :], other, PROMPT)


def refused_rows(bed: Bed, reason: str) -> None:
    handle = bed.llm.executor.prefill(prompt(PROMPT)).kv_cache
    for layer in range(len(bed.llm.model.layer_specs)):
        refused(bed, lambda layer=layer: handle.key_cache(layer), reason)  # type: ignore[misc]
        refused(bed, lambda layer=layer: handle.value_cache(layer), reason)  # type: ignore[misc]


def executor_blocks(bed: Bed) -> None:
    handle = bed.llm.executor.prefill(prompt(PROMPT)).kv_cache
    table = handle.block_table
    pages = handle.cache.pages()[0]
    assert (table.sequence_length, table.block_size) == (len(PROMPT), bed.state.page_size)
    assert table.blocks == tuple(pages.tolist())
    assert len(table.blocks) == -(-len(PROMPT) // bed.state.page_size)


def refused_blocks(bed: Bed, reason: str) -> None:
    handle = bed.llm.executor.prefill(prompt(PROMPT)).kv_cache
    refused(bed, lambda: handle.block_table, reason)


def _image(bed: Bed, *, bidirectional: bool) -> ExecutorInputs:
    """The prompt with an image of three rows, which are those of its tokens 3, 4 and 5."""
    rows = bed.runner.model.embed(torch.tensor(PROMPT[3:6]))
    ids = torch.tensor([[*PROMPT[:3], VISION_PLACEHOLDER, VISION_PLACEHOLDER, VISION_PLACEHOLDER, *PROMPT[6:]]])
    data = VisionData(embeddings=rows, bidirectional=bidirectional)
    return ExecutorInputs(text=TextData(token_ids=ids), vision=data)


def images(bed: Bed) -> None:
    """Tokens of an image see each other: what a mask of the whole forward gives."""
    llm = LlmExecutor(bed.llm.executor)
    cache = llm.create_kv_cache(dynamic=True)
    llm.prefill(_image(bed, bidirectional=True), cache)
    found = llm.step(inputs([7]), cache).reshape(-1)
    mask = causal_mask(30).view(30, 30).clone()
    mask[3:6, 3:6] = True
    with bed.sequence() as seq:
        bed.run(seq, PROMPT, mask=mask.flatten())
        wanted = bed.run(seq, [7]).logits_RV[0]
    _exact, bound = bed.checkpoint.exact_logits([*PROMPT, 7])
    assert float((found - wanted).abs().max()) <= 2 * bound


def refused_images(bed: Bed, reason: str) -> None:
    llm = LlmExecutor(bed.llm.executor)
    cache = llm.create_kv_cache(dynamic=True)
    refused(bed, lambda: llm.prefill(_image(bed, bidirectional=True), cache), reason)
    # In order they run.
    llm.prefill(_image(bed, bidirectional=False), cache)
    bed.rows(llm.step(inputs([7]), cache).reshape(1, -1), [*PROMPT, 7], len(PROMPT))


def executor_room(bed: Bed) -> None:
    executor = bed.llm.executor
    cache = executor.create_kv_cache(capacity=8, dynamic=True)
    cache.resize(64)
    assert cache.num_entries == 64
    for given in (PROMPT, PROMPT[::-1]):
        executor.prefill(prompt(given, kv_cache=cache))
        bed.rows(executor.decode(token(cache, 5)).logits[0][None], [*given, 5], len(given))
        cache.clear()
        assert cache.length == 0
    free = bed.state.num_used_pages
    executor.prefill(prompt(PROMPT, kv_cache=cache))
    executor.release_cache(cache.cache_id)
    assert bed.state.num_used_pages <= free


def executor_cancels(bed: Bed) -> None:
    """What is asked to stop before it begins leaves the cache to go on."""
    executor = bed.llm.executor
    handle = executor.prefill(prompt(PROMPT)).kv_cache
    executor.cancel()
    bed.rows(executor.decode(token(handle, 5)).logits[0][None], [*PROMPT, 5], len(PROMPT))


def executor_reports(bed: Bed) -> None:
    executor = bed.llm.executor
    handle = executor.prefill(prompt(PROMPT)).kv_cache
    assert executor.info().max_sequence_length == CONTEXT
    assert executor.supports_batch_size(1)
    assert 1 <= executor.optimal_batch_size() <= executor.capabilities().max_batch_size
    assert executor.status().memory_usage.used_bytes > 0
    assert executor.metrics().prefill_operations >= 1
    assert handle.stats.tokens_stored == len(PROMPT)
    assert handle.stats.memory_bytes > 0


def adding(a_RI: torch.Tensor, b_OR: torch.Tensor) -> Callable[..., torch.Tensor]:
    """A hook that adds an adapter's term to a map's result, as PEFT does: merged weights are
    rounded at other places.
    """
    return lambda module, given, found: found + 2.0 * (given[0] @ a_RI.T) @ b_OR.T


def executor_adapters(bed: Bed) -> None:
    """One adapter, loaded, used beside the base model, and forgotten; the oracle is transformers
    with the terms added.
    """
    executor, peer = bed.llm.executor, bed.checkpoint.model
    named = {
        name: module
        for name, module in peer.named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith(("o_proj", "out_proj", "down_proj"))
    }
    generator = torch.Generator().manual_seed(3)
    tensors, changed, exact = {}, deepcopy(peer), deepcopy(peer).double()
    for name, module in named.items():
        a_RI = torch.randn(2, module.in_features, generator=generator) * module.in_features**-0.5
        b_OR = torch.randn(module.out_features, 2, generator=generator)
        tensors |= {f"base_model.model.{name}.lora_A.weight": a_RI, f"base_model.model.{name}.lora_B.weight": b_OR}
        changed.get_submodule(name).register_forward_hook(adding(a_RI, b_OR))
        with torch.no_grad():
            exact.get_submodule(name).weight += 2.0 * b_OR.double() @ a_RI.double()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": sorted(named),
        "base_model_name_or_path": str(bed.checkpoint.path),
    }
    with TemporaryDirectory() as made:
        save_file(tensors, Path(made, "adapter_model.safetensors"))
        Path(made, "adapter_config.json").write_text(json.dumps(config))
        lora = executor.load_lora(ModelAssets(path=made))
    with_adapter = replace(bed, checkpoint=Checkpoint(bed.checkpoint.path, changed, exact=exact))
    outputs = executor.batch_prefill([prompt(PROMPT, adapter=lora), prompt(PROMPT)])
    with_adapter.rows(outputs[0].logits[0], PROMPT, 0)
    bed.rows(outputs[1].logits[0], PROMPT, 0)
    run = [*PROMPT, 5]
    with_adapter.rows(executor.decode(token(outputs[0].kv_cache, 5, adapter=lora)).logits, run, len(PROMPT))
    executor.unload_lora(lora)
    again = executor.prefill(prompt(PROMPT))
    assert torch.equal(again.logits, executor.prefill(prompt(PROMPT)).logits)
    bed.rows(again.logits[0], PROMPT, 0)


def refused_adapters(bed: Bed, reason: str) -> None:
    executor = bed.llm.executor
    refused(bed, lambda: executor.load_lora(ModelAssets(path="nowhere")), reason)
    refused(bed, lambda: executor.unload_lora(1), reason)


def executor_serializes(bed: Bed) -> None:
    executor = bed.llm.executor
    cache = executor.prefill(prompt(PROMPT)).kv_cache.cache
    other = executor.create_kv_cache(dynamic=True)
    other.load(cache.serialize())
    found = executor.decode(token(other, 5)).logits[0]
    bed.rows(found[None], [*PROMPT, 5], len(PROMPT))


EXACT: dict[str, Callable[[Bed], None]] = {
    "executor: prefill and decode": executor_runs,
    "executor: batches": executor_batches,
    "executor: position_ids": executor_positions,
    "executor: sample_tokens": executor_samples,
    "executor: select, broadcast and copy": executor_copies,
    "executor: key_cache and value_cache": executor_rows,
    "executor: block_table": executor_blocks,
    "executor: images that see each other": images,
    "executor: clear, resize and release": executor_room,
    "executor: cancel": executor_cancels,
    "executor: reports": executor_reports,
    "executor: truncate_kv": executor_truncates,
    "executor: forward_verify and commit_path": executor_verifies,
    "executor: speculative_decode and batch_speculative_decode": executor_speculates,
    "executor: serialize and load": executor_serializes,
    "executor: adapters": executor_adapters,
}
"""What tries each use where it works."""

REFUSED: dict[str, Callable[[Bed, str], None]] = {
    "executor: position_ids": refused_positions,
    "executor: key_cache and value_cache": refused_rows,
    "executor: block_table": refused_blocks,
    "executor: images that see each other": refused_images,
    "executor: adapters": refused_adapters,
}
"""What provokes each refusal."""
