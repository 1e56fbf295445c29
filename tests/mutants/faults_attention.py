"""Faults of the attention over pages in C++, as far as Python prepares it."""

from __future__ import annotations

from tests.mutants.harness import Mutant

TESTS = "kernels/test_paged_attention.py"
MUTANTS = (
    Mutant(
        name="attention-planned-for-one-type-runs-another",
        file="kernels/attention/cpu_attention.py",
        old="if x.dtype != prepared.dtype or not x.is_cpu:",
        new="if not x.is_cpu:",
        tests=(f"{TESTS}::test_arguments",),
    ),
    Mutant(
        name="attention-reads-behind-the-pool",
        file="kernels/attention/cpu_attention.py",
        old="if (highest + 1) * plan.page_size > shapes.slots:",
        new="if highest > shapes.slots:",
        tests=(f"{TESTS}::test_arguments",),
    ),
    Mutant(
        name="bits-of-a-rule-at-the-wrong-address",
        file="kernels/attention/cpu_attention.py",
        old="skipped = columns.first % BLOCK",
        new="skipped = 0",
        tests=(f"{TESTS}::test_each_feature_at_each_level",),
    ),
    Mutant(
        name="all-rows-under-the-first-rows-rule",
        file="kernels/attention/cpu_attention.py",
        old="of_rows[rows, 0] = used + blocks * np.arange(rows.size)",
        new="of_rows[rows, 0] = used",
        tests=(f"{TESTS}::test_each_feature_at_each_level",),
    ),
    Mutant(
        name="sink-rows-asked-with-the-windows-query",
        file="kernels/attention/cpu_attention.py",
        old="bound.call, q_THD.data_ptr(), None if q_sink_THD is None else q_sink_THD.data_ptr(),",
        new="bound.call, q_THD.data_ptr(), None if q_sink_THD is None else q_THD.data_ptr(),",
        tests=(f"{TESTS}::test_each_feature_at_each_level",),
    ),
    Mutant(
        name="decodes-of-the-forward-before",
        file="kernels/attention/cpu_calls.py",
        old="self._lengths[:rows], self._sizes[:rows] = lengths, sizes",
        new="self._sizes[:rows] = sizes",
        tests=("kernels/test_model_call.py::test_decodes_in_their_place_are_those_planned_anew",),
    ),
    Mutant(
        name="decodes-see-behind-their-window",
        file="kv/block_calls.py",
        old="layer.view, spec.layer_window, self._page_size, rope",
        new="layer.view, None, self._page_size, rope",
        tests=("kernels/test_model_call.py::test_decodes_in_their_place_are_those_planned_anew",),
    ),
    Mutant(
        name="maxima-of-logits-as-they-were",
        file="runner/local.py",
        old="return None if self.maxima is None or self.logits_RV._version else self.maxima",
        new="return self.maxima",
        tests=("engine/test_generate.py::test_not_finite_logits_end_one_request",),
    ),
    Mutant(
        name="norms-behind-the-mlp-with-the-wrong-eps",
        file="kernels/block.py",
        old="native.mlp_out_norm, native.mlp_out_eps = _norm(residuals.mlp_out)",
        new="native.mlp_out_norm, native.mlp_out_eps = _norm(residuals.mlp_out)[0], native.mlp_eps",
        tests=("kernels/test_block.py::test_every_arrangement_is_that_of_the_parts",),
    ),
    Mutant(
        name="the-call-forgets-the-cap",
        file="kernels/block.py",
        old="ends.embedding_scale, ends.logit_scale, ends.softcap or 0.0,",
        new="ends.embedding_scale, ends.logit_scale, 0.0,",
        tests=("kernels/test_model_call.py::test_scaled_and_capped_ends",),
    ),
    Mutant(
        name="the-call-forgets-the-embeddings-factor",
        file="models/blocks.py",
        old="factor = embedding.scale if isinstance(embedding, ScaledEmbedding) else 1.0",
        new="factor = 1.0",
        tests=("models/test_layer_kernels.py::test_bfloat16_results_do_not_depend_on_the_batch",),
    ),
    Mutant(
        name="a-norm-that-was-replaced-runs-on",
        file="models/blocks.py",
        old="if any(getattr(model, name) is not end for name, end in self.ends.items()):",
        new="if not self.ends:",
        tests=("kernels/test_block.py::test_a_model_decodes_the_same_with_and_without",),
    ),
    Mutant(
        name="states-of-another-state",
        file="kernels/block.py",
        old="found = self._states.get(given)",
        new="found = next(iter(self._states.values()), None)",
        tests=("kernels/test_mixed_blocks.py::test_a_stack_holds_no_pools_and_knows_each_state",),
    ),
    Mutant(
        name="slots-of-the-forward-before",
        file="kernels/block.py",
        old="forward = self._forward = self._mixers[0].mixers.bound(parts.states)",
        new="forward = self._forward = self._forward or self._mixers[0].mixers.bound(parts.states)",
        tests=("kernels/test_mixed_blocks.py::test_stacks_and_models",),
    ),
    Mutant(
        name="rates-are-those-of-the-projection",
        file="kernels/block.py",
        old="native.rates = found[1].place if len(found) > 1 else None",
        new="native.rates = found[0].place if len(found) > 1 else None",
        tests=("kernels/test_mixed_blocks.py::test_stacks_and_models",),
    ),
    Mutant(
        name="gates-of-heads-are-left-out",
        file="kernels/block.py",
        old="native.gated, native.mixer = gated,",
        new="native.gated, native.mixer = False,",
        tests=("kernels/test_mixed_blocks.py::test_attention_with_gates",),
    ),
    Mutant(
        name="states-that-a-call-writes-keep-their-values",
        file="kv/recurrent.py",
        old='self._set.update(dict.fromkeys(stack.members, "wanted"))',
        new='dict.fromkeys(stack.members, "wanted")',
        tests=("runner/test_joined_hybrids.py::test_random_steps",),
    ),
    Mutant(
        name="gates-by-pytorch-count-as-fixed",
        file="runner/row_dependence.py",
        old="if isinstance(part, GatedAttention | HeadGatedAttention) and not",
        new="if isinstance(part, GatedAttention | HeadGatedAttention) and",
        tests=("runner/test_recurrent_rows.py::test_gates_that_pytorch_computes_are_named",),
    ),
    Mutant(
        name="automatic-attention-stays-with-torch",
        file="build.py",
        old='return "native" if not native_problem() else "torch"',
        new='return "torch"',
        tests=(f"{TESTS}::test_without_the_library_torch_serves",),
    ),
    Mutant(
        name="sdpa-reads-pages-before-a-short-history",
        file="kernels/attention/sdpa.py",
        old="            if keys >= count:\n",
        new="            if keys:\n",
        tests=("kernels/test_attention_kernel.py::test_new_rows_from_the_pool",),
    ),
)
