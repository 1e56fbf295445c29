"""Faults of the KV state: windows, pages, trees, plans, what a pass does with them, export."""

from __future__ import annotations

from tests.mutants.harness import Mutant

WINDOWS = (
    Mutant(
        name="window-one-too-long",
        file="kv/windows.py",
        old="return np.maximum(q_T + 1 - self.size, 0)",
        new="return np.maximum(q_T - self.size, 0)",
        tests=("kv/test_windows.py::test_five_forwards",),
    ),
    Mutant(
        name="forward-eviction-by-token",
        file="kv/windows.py",
        old="return np.full_like(q_T, max(0, base - self.size))",
        new="return np.maximum(q_T + 1 - self.size, 0)",
        tests=("kv/test_windows.py::test_five_forwards",),
    ),
    Mutant(
        name="layer-window-one-too-long",
        file="kv/plans.py",
        old="return np.maximum(batch.positions + 1 - layer_window, 0), None",
        new="return np.maximum(batch.positions - layer_window, 0), None",
        tests=("kv/test_layer_windows.py::test_three_two_one",),
    ),
    Mutant(
        name="layer-window-ignored-beside-another",
        file="kv/windows.py",
        old="lows_T = np.maximum(layer_lows_T, np.where(cut_T, evicted_T + window.sink, 0))",
        new="lows_T = np.where(cut_T, evicted_T + window.sink, layer_lows_T)",
        tests=("kv/test_layer_windows.py::test_with_a_window_of_the_sequence_both_apply",),
    ),
    Mutant(
        name="page-leaves-layer-window-too-soon",
        file="kv/windows.py",
        old="layer = 0 if layer_window is None else max(0, base + 1 - layer_window)",
        new="layer = 0 if layer_window is None else max(0, base + 2 - layer_window)",
        tests=("kv/test_layer_windows.py::test_three_two_one",),
    ),
    Mutant(
        name="page-leaves-window-with-its-first-token",
        file="kv/windows.py",
        old="first_page), floor.window // page_size)",
        new="first_page), -(-floor.window // page_size))",
        tests=("kv/test_windows.py::test_five_forwards",),
    ),
    Mutant(
        name="reachable-one-too-low",
        file="kv/windows.py",
        old='spans.append(window.size - sink - (window.eviction == "token"))',
        new="spans.append(window.size - sink - 1)",
        tests=("kv/test_windows.py::test_what_slides_by_forwards_keeps_one_more",),
    ),
    Mutant(
        name="fork-keeps-the-whole-hole",
        file="kv/sequences.py",
        old="[hole.clipped(length, sink_of(parent)) for hole in parent.holes],",
        new="list(parent.holes),",
        tests=("kv/test_windows.py::test_forks_of_windowed_parents",),
    ),
    Mutant(
        name="fork-drops-the-window",
        file="kv/sequences.py",
        old="            window=parent.window,\n",
        new="            window=None,\n",
        tests=("kv/test_windows.py::test_forks_of_windowed_parents",),
    ),
    Mutant(
        name="freed-pages-not-counted",
        file="kv/need.py",
        old="leaving, _freed(index, references, sequences, leaving))",
        new="leaving, 0)",
        tests=("kv/test_window_pages.py::test_released_pages_count_for_the_same_call",),
    ),
    Mutant(
        name="shared-pages-counted-as-freed",
        file="kv/need.py",
        old="int(references[page]) == count for page",
        new="int(references[page]) >= count for page",
        tests=("kv/test_window_pages.py::test_released_pages_of_a_fork_are_not_free",),
    ),
    Mutant(
        name="null-pages-released",
        file="kv/pages.py",
        old="held = pages if pages.min() >= 0 else pages[pages >= 0]\n        left",
        new="held = pages\n        left",
        tests=("kv/test_windows.py::test_five_forwards",),
    ),
    Mutant(
        name="sink-query-at-its-true-position",
        file="kv/passes.py",
        old="return self._turn(q_THD, layer.turning, relative=True)",
        new="return self._turn(q_THD, layer.turning, relative=False)",
        tests=("kv/test_window_values.py::test_against_a_cache_that_rotates_its_keys_anew",),
    ),
    Mutant(
        name="new-rows-seen-twice",
        file="kv/passes.py",
        old='return merge(own, self.cross(source_layer_id, q_THD, "past", scoring)).out',
        new='return merge(own, self.cross(source_layer_id, q_THD, "fused", scoring)).out',
        tests=("kv/test_states.py::test_shared_kv",),
    ),
    Mutant(
        name="evicted-rows-exported",
        file="kv/exchange.py",
        old="slots = state.table.slots(layer.class_index, seq_id, state.table.held(seq_id, layer.class_index))",
        new="slots = state.table.slots(layer.class_index, seq_id, [range(sequence.length)])",
        tests=("kv/test_exchange_windows.py::test_round_trip",),
    ),
)

PAGES = (
    Mutant(
        name="tail-copy-left-out",
        file="kv/sequences.py",
        old="opened.copies.append(copies)",
        new="opened.copies.append([])",
        tests=("kv/test_examples.py::test_fork_example_of_the_specification",),
    ),
    Mutant(
        name="count-off-by-one",
        file="kv/need.py",
        old="Split(entry, last, page, valid)",
        new="Split(entry, last, page, valid - 1)",
        tests=("kv/test_examples.py::test_fork_example_of_the_specification",),
    ),
    Mutant(
        name="all-owners-stay",
        file="kv/need.py",
        old="found.remove(max(found, key=lambda split: split.valid))",
        new="found.clear()",
        tests=("kv/test_examples.py::test_a_batch_of_all_owners_leaves_one_in_place",),
    ),
    Mutant(
        name="the-shortest-owner-stays",
        file="kv/need.py",
        old="found.remove(max(found, key=lambda split: split.valid))",
        new="found.remove(min(found, key=lambda split: split.valid))",
        tests=("test_gaps.py::test_owners_of_a_page_that_hold_different_parts_of_it_write_and_abort",),
    ),
    Mutant(
        name="copied-although-the-other-owner-lets-go",
        file="kv/need.py",
        old="    holders.subtract(left_pages(index, sequences, leaving))\n",
        new="",
        tests=("kv/test_window_pages.py::test_a_page_that_one_owner_releases_is_written_in_place_by_the_other",),
    ),
    Mutant(
        name="rows-behind-the-length-not-zeroed",
        file="kv/sequences.py",
        old="if used and (part.fresh[entry] or entry in split or sequence.stale_tail):",
        new="if used and part.fresh[entry]:",
        tests=("kv/test_isolation.py",),
    ),
)

TREES = (
    Mutant(
        name="ancestry-not-inherited",
        file="kv/trees.py",
        old="ancestry[node] = ancestry[parent]",
        new="ancestry[node, parent] = True",
        tests=("kv/test_trees.py::test_what_nodes_see",),
    ),
    Mutant(
        name="depth-off-by-one",
        file="kv/trees.py",
        old="depths[node] = 0 if parent < 0 else depths[parent] + 1",
        new="depths[node] = depths[parent] + 1 if parent > 0 else 0",
        tests=("kv/test_trees.py::test_four_trees",),
    ),
    Mutant(
        name="tree-ignores-its-base",
        file="kv/plans.py",
        old="= bases[entry] + tree.depths[-need.counts[entry] :]",
        new="= tree.depths[-need.counts[entry] :]",
        tests=("kv/test_trees.py::test_four_trees",),
    ),
    Mutant(
        name="siblings-at-different-positions",
        file="kv/plans.py",
        old="bases[entry] + tree.depths[-need.counts[entry] :]",
        new="stored[entry] + np.arange(counts[entry])",
        tests=("kv/test_trees.py::test_four_trees",),
    ),
    Mutant(
        name="commit-without-copies",
        file="kv/sequences.py",
        old="copies[index] += [SlotCopy(int(slots[node]), int(slots[place]), 1) for node, place in moves]",
        new="copies[index] += []",
        tests=("kv/test_trees.py::test_rounds_of_one_two_and_four",),
    ),
    Mutant(
        name="commit-by-batch-order",
        file="kv/sequences.py",
        old="sequences = [self.get(seq_id) for seq_id in seq_ids]\n        self.require_closed(verb)",
        new="sequences = [self.get(seq_id) for seq_id in sorted(seq_ids, key=self.ids.index)]\n        self.require_closed(verb)",
        tests=("kv/test_trees.py::test_commit_goes_by_ids",),
    ),
    Mutant(
        name="nodes-forgotten-at-the-end-of-a-forward",
        file="kv/sequences.py",
        old="                sequence.tree = tree\n",
        new="                sequence.tree = None\n",
        tests=("kv/test_trees.py::test_rounds_of_one_two_and_four",),
    ),
    Mutant(
        name="past-has-the-new-tokens",
        file="kv/plans.py",
        old="return _plan(batch, cut, page_size, layer_window, batch.stored, tuple(rules))",
        new="return _plan(batch, tuple(tables), page_size, layer_window, batch.stored + batch.counts, tuple(rules))",
        tests=("kv/test_states.py::test_self_and_past_are_the_whole",),
    ),
    Mutant(
        name="nodes-of-earlier-rounds-unseen",
        file="kv/plans.py",
        old="rules.append(KeyRule(first=base, allowed=ancestry[-count:], positions=base + depths))",
        new="rules.append(KeyRule(first=base, allowed=ancestry[-count:] & (np.arange(depths.size) >= depths.size - count), positions=base + depths))",
        tests=("kv/test_trees.py::test_second_rounds_of_chains_are_causal",),
    ),
    Mutant(
        name="mask-ignores-windows",
        file="kv/plans.py",
        old="return replace(plan, rules=tuple(rules))",
        new="return replace(plan, rules=tuple(rules), lows=None, sinks=None)",
        tests=("kv/test_masks.py::test_windows_still_apply_under_a_mask",),
    ),
    Mutant(
        name="inline-keys-of-nodes-at-their-addresses",
        file="kv/passes.py",
        old="addresses[rule.first : rule.first + rule.positions.size] = rule.positions",
        new="pass",
        tests=("kv/test_trees.py::test_a_tree_is_all_its_paths",),
    ),
)

STATES = (
    Mutant(
        name="pop-leaves-the-recurrent-state",
        file="kv/hybrid.py",
        old="        self.recurrent.table.pop(seq_id, kept)\n",
        new="        pass\n",
        tests=("kv/test_hybrid.py::test_fork_and_pop_to_every_position",),
    ),
    Mutant(
        name="fork-takes-the-present-recurrent-state",
        file="kv/hybrid.py",
        old="self.recurrent.table.fork(parent_id, child_id, kept)",
        new="self.recurrent.table.fork(parent_id, child_id, self.recurrent.table.position(parent_id))",
        tests=("kv/test_hybrid.py::test_fork_and_pop_to_every_position",),
    ),
    Mutant(
        name="commit-keeps-the-parent's-recurrent-state",
        file="kv/hybrid.py",
        old="self.recurrent.table.commit(seq_id, path)",
        new="self.recurrent.table.commit(seq_id, path[:-1])",
        tests=("kv/test_hybrid.py::test_verify_then_go_back",),
    ),
    Mutant(
        name="latent-past-not-merged",
        file="kv/latent.py",
        old="    if not batch.stored.any():\n",
        new="    if True:\n",
        tests=("kv/test_latent.py::test_every_chunking_of_twelve_tokens",),
    ),
    Mutant(
        name="recurrence-decays-after-the-token",
        file="kernels/decays.py",
        old=".tril_(-1)",
        new=".tril_()",
        tests=(
            "test_recurrence.py::test_example_of_linear_attention",
            "test_recurrence.py::test_in_pieces_with_the_state_carried",
        ),
    ),
    Mutant(
        name="convolution-state-shifted-by-one",
        file="ops/recurrence.py",
        old="window_WC[1:]",
        new="window_WC[:-1]",
        tests=("test_recurrence.py::test_example_of_the_convolution", "test_recurrence.py::test_convolution"),
    ),
)

MUTANTS = (*WINDOWS, *PAGES, *TREES, *STATES)
