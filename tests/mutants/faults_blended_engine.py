"""Faults of blended prompts in the engine."""

from __future__ import annotations

from tests.mutants.harness import Mutant

MUTANTS = (
    Mutant(
        name="cached-keys-stay-where-they-were",
        file="blend/forward.py",
        old="        return self._moves[name](k_NHD)",
        new="        return k_NHD.clone()",
        tests=("engine/test_blending.py::test_true_rows_change_nothing",),
    ),
    Mutant(
        name="moves-of-another-piece",
        file="blend/forward.py",
        old="name = (rope, piece.original, piece.start, len(k_NHD))",
        new="name = (rope, len(k_NHD))",
        tests=("engine/test_blending.py::test_true_rows_change_nothing",),
    ),
    Mutant(
        name="engine-reads-cached-rows-at-the-check-layer",
        file="blend/forward.py",
        old="        self._write(layer, self.alive, fresh.k_AHD, fresh.v_AHD, pass_)\n",
        new="        self._fill(layer, pass_)\n",
        tests=(
            "engine/test_blending.py::test_true_rows_change_nothing",
            "engine/test_blending.py::test_a_wrong_row_changes_something",
        ),
    ),
    Mutant(
        name="the-head-of-rows-that-did-not-run",
        file="runner/local.py",
        old="index = np.searchsorted(extras.rows.alive, np.arange(len(tokens)) if index is None else index)",
        new="index = np.minimum(np.arange(len(tokens)) if index is None else index, len(extras.rows.alive) - 1)",
        tests=("engine/test_blending.py::test_a_mixed_step",),
    ),
    Mutant(
        name="adapters-of-rows-that-did-not-run",
        file="runner/local.py",
        old="        if entering_SE.shape[0] != x_TE.shape[0]:",
        new="        if False:",
        tests=("engine/test_blending.py::test_adapters_in_one_step",),
    ),
    Mutant(
        name="blended-state-is-exact",
        file="engine/blending.py",
        old="            if left_out.any():\n",
        new="            if False:\n",
        tests=("engine/test_blending.py::test_the_exact_cache_never_finds_it",),
    ),
    Mutant(
        name="chunks-of-other-salts",
        file="branches/state_keys.py",
        old="ChunkKeys.of(*of_model, salt, adapter=adapter",
        new="ChunkKeys.of(*of_model, None, adapter=adapter",
        tests=("engine/test_blending.py::test_salts_and_adapters_keep_their_own",),
    ),
    Mutant(
        name="approximate-state-is-moved-again",
        file="engine/session_edits.py",
        old="exact = state.origin.exact_part(state.computed)",
        new="exact = state.computed",
        tests=("engine/test_blending.py::test_a_blended_edit_is_marked",),
    ),
    Mutant(
        name="a-divergence-the-other-way-round",
        file="engine/unsampled_runs.py",
        old="(full_V.exp() * (full_V - found_V))",
        new="(found_V.exp() * (found_V - full_V))",
        tests=("engine/test_blending.py::test_verification",),
    ),
    Mutant(
        name="ranks-choose-by-their-own-heads",
        file="blend/scores.py",
        old="return sums if self.all_reduce is None else self.all_reduce(sums)",
        new="return sums",
        tests=("blend/test_ranks.py::test_ranks_choose_as_one_does",),
    ),
    Mutant(
        name="prompts-with-nothing-cached-are-blended",
        file="engine/blending.py",
        old="        if count < params.least:\n",
        new="        if False:\n",
        tests=("engine/test_blended_invariants.py::test_a_miss_costs_next_to_nothing",),
    ),
    Mutant(
        name="masks-aligned-at-the-bottom-right",
        file="kv/plans.py",
        old="        positions=positions,\n        positions_T=uploaded(positions, batch.device),\n        max_position",
        new="        positions=np.arange(rows.size) + np.repeat(batch.stored + batch.added - starts[1:], np.diff(starts)),\n"
        "        positions_T=uploaded(positions, batch.device),\n        max_position",
        tests=("engine/test_blended_invariants.py::test_every_family",),
    ),
    Mutant(
        name="chunks-of-another-place",
        file="blend/retriever.py",
        old="pieces.append(RowsPiece(part.start, k, v, self._lead + part.skip))",
        new="pieces.append(RowsPiece(part.start, k, v, part.skip + 1))",
        tests=("engine/test_blended_invariants.py::test_every_family",),
    ),
    Mutant(
        name="rehearsed-rows-count-as-given",
        file="kv/state_pass.py",
        old="        self._forward.chosen.take_back(layer_id, again)\n",
        new="",
        tests=("kv/test_rehearsal.py::test_what_was_rehearsed_is_not_of_the_forward",),
    ),
    Mutant(
        name="masses-of-all-that-rehearse",
        file="kv/state_pass.py",
        old="self._asks = np.isin(rows, asking, assume_unique=True)",
        new="self._asks = np.ones(len(rows), dtype=np.bool_)",
        tests=("kv/test_rehearsal.py::test_latent_rows",),
    ),
    Mutant(
        name="masses-of-earlier-layers",
        file="kv/state_pass.py",
        old="        if layer_id < self._first_layer:\n",
        new="        if False:\n",
        tests=(
            "kv/test_rehearsal.py::test_any_rows_of_any_entries",
            "engine/test_blended_questions.py::test_the_mass_is_that_of_the_layers_that_select_and_later",
        ),
    ),
    Mutant(
        name="learned-logits-forgotten-in-sums",
        file="ops/attention.py",
        old="        if sinks_H is not None:\n            sinks_HGn1",
        new="        if False:\n            sinks_HGn1",
        tests=("kv/test_rehearsal.py::test_learned_logits_take_their_share",),
    ),
    Mutant(
        name="a-question-that-is-not-there-asks",
        file="engine/prompt_blend.py",
        old="asks = stop > min(self.question, self.length - 1) and 0 < self.ratio < 1",
        new="asks = 0 < self.ratio < 1",
        tests=("engine/test_blended_questions.py::test_where_v_takes_its_place",),
    ),
    Mutant(
        name="adapters-of-rows-that-do-not-rehearse",
        file="runner/local.py",
        old="        self.adapters.activate(adapters, running.tolist(), [0] * len(counts))\n",
        new="",
        tests=("engine/test_blending.py::test_adapters_in_one_step",),
    ),
    Mutant(
        name="exact-behind-any-token",
        file="engine/blending.py",
        old="        if tuple(work.tokens.ids[: len(self.lead)].tolist()) == self.lead:\n",
        new="        if True:\n",
        tests=("engine/test_blended_questions.py::test_only_behind_its_lead",),
    ),
    Mutant(
        name="exact-chunks-are-approximate",
        file="engine/blending.py",
        old="                left_out &= ~chunk.rows.exact\n",
        new="                pass\n",
        tests=("engine/test_blended_questions.py::test_a_chunk_where_it_was_computed_is_exact",),
    ),
)
