"""Faults of what is computed: attention kernels, rotation, experts, families, the fallback."""

from __future__ import annotations

from tests.mutants.harness import Mutant

NAMES = (
    Mutant(
        name="zeros-of-gptq-that-borrow",
        file="weights/gptq.py",
        old="            zeros = zeros + sum(1 << at for at in range(0, 32, self.bits))\n        zeros_gO = self._unpacked(zeros, shape[0])\n",
        new="            pass\n        zeros_gO = self._unpacked(zeros, shape[0]) + self.zeros_less_one & (1 << self.bits) - 1\n",
        tests=("models/test_quantized.py::test_values_are_those_of_the_layout",),
    ),
    Mutant(
        name="chatglm-without-its-stretched-base",
        file="models/spellings.py",
        old='"rope_theta": 10_000.0 * fields.number("rope_ratio", 1.0)',
        new='"rope_theta": 10_000.0',
        tests=("models/test_spellings.py::test_chatglm_has_the_logits_of_transformers_for_glm",),
    ),
    Mutant(
        name="the-first-chatglm-taken-for-the-second",
        file="models/spellings.py",
        old="        if fields.get(name) != value:\n",
        new="        if fields.get(name) not in (None, value):\n",
        tests=("models/test_spellings.py::test_the_first_chatglm_is_refused_by_name",),
    ),
    Mutant(
        name="biases-of-internlm-that-differ",
        file="models/spellings.py",
        old='if found.get("attention_bias", False) != found.get("mlp_bias", False):',
        new="if False:",
        tests=("models/test_spellings.py::test_what_llama_does_not_compute_is_refused_by_name",),
    ),
    Mutant(
        name="queries-that-grow-behind-a-chunk",
        file="models/fallback.py",
        old="        lengths.append(int(text.floor_scale) - 1)\n",
        new="        pass\n",
        tests=("models/test_fallback.py::test_chunks_that_cover_the_sequences_are_full_attention",),
    ),
    Mutant(
        name="code-of-a-checkpoint-for-an-unknown-type",
        file="models/fallback.py",
        old='own_model and str(values.get("model_type")) in transformers.CONFIG_MAPPING',
        new="own_model",
        tests=("models/test_fallback.py::test_unknown_and_foreign_code_are_refused",),
    ),
)
KERNELS = (
    Mutant(
        name="four-bit-weights-of-another-scale",
        file="build.py",
        old="native_rows(), native_linear(), form,",
        new="native_rows(), native_linear(), None,",
        tests=("engine/test_quantized.py::test_tokens_are_those_of_the_rounded_weights",),
    ),
    Mutant(
        name="quantised-weights-have-the-fingerprint-of-the-checkpoint",
        file="models/fingerprint.py",
        old="    if model.quantization:\n        yield model.quantization\n",
        new="",
        tests=("engine/test_quantized.py::test_states_do_not_pass_between_weights",),
    ),
    Mutant(
        name="head-in-four-bits",
        file="contracts/block_calls.py",
        old="return replace(self, quantization=found)",
        new="return self",
        tests=("models/test_packed.py::test_every_linear_map_has_the_form",),
    ),
    Mutant(
        name="eight-bit-floats-of-one-scale",
        file="weights/float8.py",
        old="wide.abs().amax(-1, keepdim=True)",
        new="wide.abs().amax().expand(len(wide), 1)",
        tests=("kernels/test_float8.py::test_rows_are_rounded",),
    ),
    Mutant(
        name="experts-keep-their-weights-silently",
        file="nn/experts.py",
        old="            stack.check(kernels)\n        grown = pack_maps(self, kernels)",
        new="            if stack.check(kernels):\n                break\n        grown = pack_maps(self.gate, kernels)",
        tests=("kernels/test_float8.py::test_experts_against_the_reference",),
    ),
    Mutant(
        name="experts-that-do-not-fit-change-half",
        file="nn/experts.py",
        old="            stack.check(kernels)\n",
        new="            pass\n",
        tests=("kernels/test_float8.py::test_experts_are_refused",),
    ),
    Mutant(
        name="stacks-of-eight-bit-floats-on-newer-devices",
        file="kernels/linear/float8.py",
        old="if capability != STACK_CAPABILITY:",
        new="if capability < STACK_CAPABILITY:",
        tests=("kernels/test_float8.py::test_devices_without_the_units",),
    ),
    Mutant(
        name="slots-that-are-read-are-overwritten",
        file="kernels/rows/triton_rows.py",
        old=" or np.isin(*moves_2N).any():",
        new=":",
        tests=("kernels/test_row_kernels.py::test_copies_of_slots",),
    ),
    Mutant(
        name="draws-of-the-next-token",
        file="kernels/draw/draw_programs.py",
        old="(before + tl.cumsum(weight_B, 0) <= target)",
        new="(before + tl.cumsum(weight_B, 0) < target)",
        tests=("kernels/test_triton_draw.py::test_draws",),
    ),
    Mutant(
        name="captured-decodes-are-not-in-the-budget",
        file="runner/memory_profile.py",
        old="- use.outside - use.peak - graphs)",
        new="- use.outside - use.peak)",
        tests=("engine/test_memory_profile.py::test_captured_decodes_are_in_the_budget",),
    ),
    Mutant(
        name="sizes-with-inputs-of-their-own",
        file="runner/graph.py",
        old="*size, self._longest, self.shared)",
        new="*size, self._longest, SharedMemory(self._state.device))",
        tests=("runner/test_graph_runner.py::test_sizes_share_their_memory",),
    ),
    Mutant(
        name="float32-weights-are-rounded",
        file="kernels/linear/cpu_linear.py",
        old="if self._fits(weight_OI.data_ptr(), weight_OI.numel()):",
        new="if True:",
        tests=("models/test_packed.py::test_a_kernel_keeps_what_the_weights_are",),
    ),
    Mutant(
        name="rows-with-gaps-are-read-as-one",
        file="kernels/linear/cpu_linear.py",
        old="x_TI.data_ptr(), x_TI.stride(0), rows",
        new="x_TI.data_ptr(), x_TI.shape[1], rows",
        tests=("kernels/test_native_linear.py::test_against_the_reference",),
    ),
    Mutant(
        name="rows-behind-the-sink",
        file="kernels/attention/groups.py",
        old="if part.sink and len(group) > 1:",
        new="if False:",
        tests=("kernels/test_attention_kernel.py::test_rows_behind_the_sink_are_not_read",),
    ),
    Mutant(
        name="kernel-window-one-too-long",
        file="kernels/attention/visibility.py",
        old="else np.maximum(plan.lows - origins, 0)",
        new="else np.maximum(plan.lows - origins - 1, 0)",
        tests=("kernels/test_attention_kernel.py::test_each_feature[usual-layer window-float32]",),
    ),
    Mutant(
        name="tree-mask-missing",
        file="kernels/attention/groups.py",
        old="torch.from_numpy(visible).to(plan.device), 0.0",
        new="torch.from_numpy(np.ones_like(visible)).to(plan.device), 0.0",
        tests=("kernels/test_attention_kernel.py::test_each_feature[usual-trees-float32]",),
    ),
    Mutant(
        name="rule-ignores-the-layer-window",
        file="kernels/attention/visibility.py",
        old="visible = allowed if plan.lows is None else allowed & (positions >= plan.lows[start:stop, None])",
        new="visible = allowed",
        tests=("kernels/test_attention_kernel.py::test_each_feature[usual-deep trees, windows-float32]",),
    ),
    Mutant(
        name="soft-cap-ignored",
        file="kernels/attention/lse_attention.py",
        old="scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)",
        new="pass",
        tests=("kernels/test_attention_kernel.py::test_each_feature[usual-soft cap-float32]",),
    ),
    Mutant(
        name="learned-sinks-dropped",
        file="kernels/attention/sdpa.py",
        old="        if sinks_H is not None:\n            nothing",
        new="        if sinks_H is not None and plan.sink is not None:\n            nothing",
        tests=("kernels/test_attention_kernel.py::test_each_feature[usual-learned logits-float32]",),
    ),
    Mutant(
        name="padding-reads-another-sequence",
        file="kernels/attention/groups.py",
        old="row[table.size :] = table[0]",
        new="row[table.size :] = tables[0][0]",
        tests=("kernels/test_attention_kernel.py::test_sequences_do_not_reach_each_other",),
    ),
    Mutant(
        name="merge-weights-swapped",
        file="ops/attention.py",
        old="(wa.unsqueeze(-1) * a.out.to(compute) + wb.unsqueeze(-1) * b.out.to(compute))",
        new="(wb.unsqueeze(-1) * a.out.to(compute) + wa.unsqueeze(-1) * b.out.to(compute))",
        tests=("kv/test_attention_backends.py::TestMerge",),
    ),
)

ROPE = (
    Mutant(
        name="attention-factor-on-cos-only",
        file="ops/rope.py",
        old="cos, sin = cos * self.spec.attention_factor, sin * self.spec.attention_factor",
        new="cos = cos * self.spec.attention_factor",
        tests=("kv/test_rope.py::test_far_positions_against_exact_arithmetic",),
    ),
    Mutant(
        name="attention-factor-twice-when-turned-back",
        file="ops/rope.py",
        old="return cos_T1R / self.spec.attention_factor, sin_T1R / -self.spec.attention_factor",
        new="return cos_T1R, -sin_T1R",
        tests=("kv/test_rope.py::test_rotations_compose_and_turn_back",),
    ),
    Mutant(
        name="yarn-ramp-reversed",
        file="ops/rope.py",
        old="return 1 - ((torch.arange(pairs",
        new="return ((torch.arange(pairs",
        tests=("kv/test_rope.py::test_yarn_against_transformers",),
    ),
    Mutant(
        name="pairs-of-columns-swapped",
        file="ops/rope.py",
        old="        if self.spec.interleaved:\n",
        new="        if not self.spec.interleaved:\n",
        tests=("kv/test_rope.py::test_interleaved_against_transformers",),
    ),
    Mutant(
        name="angles-in-float32",
        file="ops/rope.py",
        old="angle = positions.to(torch.float64).unsqueeze(-1) * freq_P",
        new="angle = positions.to(torch.float32).unsqueeze(-1) * freq_P.float()",
        tests=("kv/test_rope.py::test_far_positions_against_exact_arithmetic",),
    ),
    Mutant(
        name="longrope-by-the-context-of-the-model",
        file="models/rope_config.py",
        old="is_long = context.length > original",
        new="is_long = context.max_position > original",
        tests=("models/test_rope_config.py::test_longrope_is_fixed_by_the_longest_sequence",),
    ),
)

EXPERTS = (
    Mutant(
        name="sparse-mixer-shares-with-the-first-expert",
        file="ops/experts.py",
        old="near_TX = left_TX.masked_fill",
        new="near_TX = logits_TX.masked_fill",
        tests=("models/test_moe_families.py::test_sparse_mixers_choice_is_that_of_transformers",),
    ),
    Mutant(
        name="renormalisation-dropped",
        file="ops/experts.py",
        old="        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + routing.summand)\n",
        new="        pass\n",
        tests=("models/test_experts.py::test_route_by_definition",),
    ),
    Mutant(
        name="ties-broken-the-other-way",
        file="ops/experts.py",
        old="    best_TK, experts_TK = torch.topk(choice_TX, routing.top_k, dim=-1)\n",
        new=(
            "    best_TK, experts_TK = torch.topk(choice_TX.flip(-1), routing.top_k, dim=-1)\n"
            "    experts_TK = logits_TX.shape[-1] - 1 - experts_TK\n"
        ),
        tests=("models/test_experts.py::test_route_chooses_among_equal_values_as_transformers_does",),
    ),
    Mutant(
        name="experts-of-another-token",
        file="nn/experts.py",
        old="place_P[pair_P] = torch.arange(len(pair_P), device=x_TE.device)",
        new="place_P = pair_P",
        tests=("models/test_experts.py::test_experts_against_the_reference",),
    ),
    Mutant(
        name="clamped-gate-without-its-one",
        file="ops/rows.py",
        old=".mul_(up.add_(1))",
        new=".mul_(up)",
        tests=("models/test_experts.py::test_clamped_gate",),
    ),
)

ROWS = (
    Mutant(
        name="rows-of-a-wider-tensor-without-gaps",
        file="kernels/rows/cpu_rows.py",
        old="                stride = x.stride(0)\n",
        new="                stride = width\n",
        tests=("kernels/test_row_kernels.py::test_norms",),
    ),
    Mutant(
        name="float32-weights-read-as-bfloat16",
        file="kernels/rows/cpu_rows.py",
        old="(torch.bfloat16, torch.float32): 2,",
        new="(torch.bfloat16, torch.float32): 1,",
        tests=("kernels/test_row_kernels.py::test_norms",),
    ),
    Mutant(
        name="scaled-sums-rounded-by-their-place",
        file="ops/rows.py",
        old="return y_TE.copy_(y_TE.float().mul_(scale).add_(x_TE))",
        new="return torch.add(x_TE, y_TE, alpha=scale, out=y_TE)",
        tests=("kernels/test_row_kernels.py::test_scaled_sums_do_not_depend_on_the_place",),
    ),
    Mutant(
        name="scaled-sums-without-their-factor",
        file="kernels/rows/cpu_rows.py",
        old="*(types, None, y_TE.data_ptr(), width, x_TE.data_ptr(), width, scale, None),",
        new="*(types, None, y_TE.data_ptr(), width, x_TE.data_ptr(), width, 1.0, None),",
        tests=("kernels/test_row_kernels.py::test_scaled_sums_and_their_norms",),
    ),
    Mutant(
        name="soft-caps-left-to-pytorch",
        file="nn/embedding.py",
        old="return logits_RV if self.softcap is None else self.row_kernels.soft_cap(logits_RV, self.softcap)",
        new="return logits_RV if self.softcap is None else REFERENCE_ROWS.soft_cap(logits_RV, self.softcap)",
        tests=("runner/test_recurrent_rows.py::test_rows_are_the_same_in_any_batch",),
    ),
    Mutant(
        name="residuals-scaled-by-pytorch",
        file="models/blocks.py",
        old="self.row_kernels.add_scaled(y_TE, x_TE, self.scale)",
        new="y_TE.mul_(self.scale).add_(x_TE)",
        tests=("models/test_layer_kernels.py::test_bfloat16_results_do_not_depend_on_the_batch",),
    ),
    Mutant(
        name="falcons-mixers-unscaled",
        file="models/falcon_h1.py",
        old="x_TE, config.mixer_out)",
        new="x_TE, 1.0)",
        tests=(
            "models/test_recurrent_families.py::test_float32_logits_are_as_close_to_float64_as_those_of_transformers[falcon-h1]",
        ),
    ),
    Mutant(
        name="keys-normed-with-the-weight-of-queries",
        file="ops/rows.py",
        old="rows.rms_norm(k_THD, norms.k_weight_D, norms.eps)",
        new="rows.rms_norm(k_THD, norms.q_weight_D, norms.eps)",
        tests=("kernels/test_row_kernels.py::test_heads_are_placed",),
    ),
    Mutant(
        name="values-written-where-keys-of-others-are",
        file="ops/rows.py",
        old=".view(-1, kv_heads, dv))",
        new=".view(-1, kv_heads, dv).flip(0))",
        tests=("kernels/test_row_kernels.py::test_heads_are_placed",),
    ),
    Mutant(
        name="layers-keep-pytorchs-form",
        file="nn/packed.py",
        old="        layer.row_kernels = kernels.rows\n",
        new="        pass\n",
        tests=("models/test_layer_kernels.py::test_tokens_of_dense_families",),
    ),
    Mutant(
        name="queries-of-a-sink-in-one-piece",
        file="kv/state_pass.py",
        old=" or prepared.plan.sinks is not None:",
        new=":",
        tests=("kv/test_window_values.py::test_against_a_cache_that_rotates_its_keys_anew",),
    ),
    Mutant(
        name="fused-heads-placed-without-the-rows-left-out",
        file="kv/state_pass.py",
        old="        self.begin_write(layer_id)\n        rotation",
        new="        rotation",
        tests=("kv/test_narrowing.py::test_a_layer_that_lacks_rows_is_refused",),
    ),
    Mutant(
        name="raw-keys-stored-turned",
        file="kv/state_pass.py",
        old='qkv_TC.dtype != self._paged.dtype or spec.rope_mode == "inline"\n',
        new="qkv_TC.dtype != self._paged.dtype\n",
        tests=("kv/test_window_values.py",),
    ),
)

CORES = (
    Mutant(
        name="threads-of-one-core-count-as-cores",
        file="kernels/cpu_process.py",
        old='siblings.add(path.read_text(encoding="ascii").strip())',
        new='siblings.add(path.read_text(encoding="ascii") + str(cpu))',
        tests=("kernels/test_cpu_process.py::test_siblings_are_one_core",),
    ),
    Mutant(
        name="only-the-own-group-limits",
        file="base/process_limits.py",
        old="(inside, *inside.parents) if inside.name else (inside,)",
        new="(inside,)",
        tests=("base/test_process_limits.py::test_the_tightest_group_limits_time",),
    ),
    Mutant(
        name="a-chosen-number-of-threads-is-lowered",
        file="kernels/cpu_process.py",
        old="usable < now and now in defaults and",
        new="usable < now and",
        tests=("kernels/test_cpu_process.py::test_the_default_is_lowered_and_a_choice_stays",),
    ),
)

PARITY = "models/test_parity.py::test_float32_logits_are_as_close_to_float64_as_those_of_transformers"

FAMILIES = (
    Mutant(
        name="gemma-norm-without-its-one",
        file="models/decoder.py",
        old="one_more = weight.float() + 1.0",
        new="one_more = weight.float()",
        tests=(f"{PARITY}[gemma2]",),
    ),
    Mutant(
        name="gemma-query-scale-of-the-head",
        file="models/gemma.py",
        old='sm_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,\n            softcap',
        new='sm_scale=fields.number("query_pre_attn_scalar", 256.0) and None,\n            softcap',
        tests=(f"{PARITY}[gemma2]",),
    ),
    Mutant(
        name="gemma-windows-shifted-by-one",
        file="models/geometry.py",
        old="tuple(layer % 2 == 0 for layer",
        new="tuple(layer % 2 == 1 for layer",
        tests=("models/test_config.py::test_each_layer_has_the_rotation_and_the_window_of_its_kind",),
    ),
    Mutant(
        name="gemma-one-theta-for-all",
        file="models/geometry.py",
        old="[sliding if one else full for one in windowed]",
        new="full",
        tests=(f"{PARITY}[gemma3-ropes]",),
    ),
    Mutant(
        name="gpt-oss-sinks-dropped",
        file="models/decoder.py",
        old="return spec if sinks_H is None else replace(spec, sinks=tuple(sinks_H.tolist()))",
        new="return spec",
        tests=("models/test_moe_families.py::test_float32_logits[gpt-oss]",),
    ),
    Mutant(
        name="queries-of-ministral3-do-not-grow",
        file="nn/attention.py",
        old="1 + self.growth.rate * torch.log1p(periods_T.float())",
        new="1 + 0 * torch.log1p(periods_T.float())",
        tests=(f"{PARITY}[ministral3]",),
    ),
    Mutant(
        name="layers-without-rotation-rotated",
        file="models/dense_families.py",
        old="[rope if one else None for one in rotates]",
        new="rope",
        tests=(f"{PARITY}[smollm3]",),
    ),
    Mutant(
        name="post-norms-before",
        file="models/decoder.py",
        old='before, behind = config.placement != "post", config.placement != "pre"',
        new='before, behind = True, config.placement != "pre"',
        tests=(f"{PARITY}[olmo2]",),
    ),
    Mutant(
        name="parallel-blocks-one-after-the-other",
        file="models/blocks.py",
        old="return self.attention(n_TE, pass_).add_(x_TE).add_(self.mlp(n_TE))",
        new="h_TE = self.attention(n_TE, pass_).add_(x_TE)\n        return h_TE.add_(self.mlp(self.norm(h_TE)))",
        tests=(f"{PARITY}[cohere2]",),
    ),
    Mutant(
        name="fallback-takes-a-window-for-full",
        file="models/probe.py",
        old="return None if window > last else window",
        new="return None",
        tests=("models/test_fallback.py::test_windows_are_found",),
    ),
    Mutant(
        name="fallback-runs-without-a-tensor",
        file="models/fallback.py",
        old='checkpoint.refuse_names(sorted(found["missing_keys"]), surplus, len(outline.state_dict()))',
        new="pass",
        tests=("models/test_fallback.py::test_files_that_contradict_the_model",),
    ),
    Mutant(
        name="a-stored-head-that-is-not-read",
        file="models/loading.py",
        old="        _check_tied(checkpoint, family, whole)\n",
        new="",
        tests=("models/test_checkpoint.py::test_configuration_that_the_tensors_contradict",),
    ),
    Mutant(
        name="memory-that-a-group-holds-is-free",
        file="base/process_limits.py",
        old="limit - used + cached",
        new="limit + cached",
        tests=("base/test_process_limits.py::test_memory_is_free_within_every_limit",),
    ),
)

FLOATS_OF_8_BITS = (
    Mutant(
        name="float8-weights-that-are-no-numbers-pass",
        file="weights/scaled_float8.py",
        old="(codes_OI.view(torch.uint8) & 0x7F == 0x7F).any()",
        new="(codes_OI.view(torch.uint8) == 0x7F).any()",
        tests=("models/test_kept_codes.py::test_weights_that_are_no_numbers_are_refused",),
    ),
    Mutant(
        name="float8-blocks-of-rows-share-the-first-scale",
        file="weights/scaled_float8.py",
        old="scales_mg.repeat_interleave(height, 0)[:rows]",
        new="scales_mg.repeat(height, 1)[:rows]",
        tests=("models/test_kept_codes.py::test_kept_values_are_the_expanded_ones_before_they_are_rounded",),
    ),
)

FLOATS_OF_4_BITS = (
    Mutant(
        name="nvfp4-without-the-number-of-a-tensor",
        file="weights/gguf_files.py",
        old="        if name not in self._parts.places:\n            return torch.ones(*rows, 1)\n",
        new="        if name:\n            return torch.ones(*rows, 1)\n",
        tests=("models/test_gguf_blocks.py::test_numbers_of_tensors_in_nvfp4",),
    ),
    Mutant(
        name="nvfp4-multiplied-by-what-divides",
        file="weights/nvfp4.py",
        old="1 / found if self.divides and found else found",
        new="found",
        tests=("models/test_recorded_values.py::test_values_are_those_of_the_library",),
    ),
    Mutant(
        name="nvfp4-of-a-rank-with-the-heads-of-all-rows",
        file="weights/lazy_parameters.py",
        old="place.cut_rows(rows[..., :head])",
        new="rows[..., :head].narrow(0, 0, len(blocks))",
        tests=("ranks/test_divided_blocks.py::test_nvfp4_of_gguf_files",),
    ),
)

VOCABULARIES = (
    Mutant(
        name="texts-of-a-file-that-are-not-proven",
        file="weights/gguf_texts.py",
        old="    ends = ends[: int(np.append(ends[:-1] != begins[1:], True).argmax()) + 1]\n",
        new="",
        tests=("models/test_gguf_texts.py::test_bounds_and_texts_are_those_of_one_after_the_other[0.5]",),
    ),
    Mutant(
        name="texts-of-a-file-beyond-its-end",
        file="weights/gguf_texts.py",
        old="position + ends[ends <= len(data) - position]",
        new="position + ends",
        tests=("models/test_gguf_texts.py::test_bounds_and_texts_are_those_of_one_after_the_other[1.0]",),
    ),
    Mutant(
        name="the-last-of-equal-tokens",
        file="text/gguf_tokenizer.py",
        old="in reversed([*enumerate(self.tokens)])",
        new="in enumerate(self.tokens)",
        tests=("text/test_gguf_tokenizer.py::test_the_first_of_equal_tokens_counts",),
    ),
    Mutant(
        name="merges-of-the-worst-scores-first",
        file="kernels/merges.py",
        old="np.argsort(-np.array",
        new="np.argsort(np.array",
        tests=("kernels/test_merges.py::test_every_text_has_the_tokens_of_all_merges[1]",),
    ),
)

MUTANTS = (
    *NAMES,
    *KERNELS,
    *ROPE,
    *EXPERTS,
    *ROWS,
    *CORES,
    *FAMILIES,
    *FLOATS_OF_8_BITS,
    *FLOATS_OF_4_BITS,
    *VOCABULARIES,
)
