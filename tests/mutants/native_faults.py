"""Faults in the C++ kernels (``python -m tests.mutants.native_faults``)."""

from __future__ import annotations

import sys

from tests.mutants.native import EMULATED, NativeMutant, main

PORTABLE, AVX2 = 0, 1
ATTENTION = ("kernels/test_paged_attention.py::test_lengths", "kernels/test_paged_attention.py::test_random_plans")
FEATURES = "kernels/test_paged_attention.py::test_each_feature_at_each_level"
BLOCKS = "kernels/test_native_blocks.py::"
MIXERS = ("kernels/test_native_mixers.py::test_equal_to_the_definition",)
MODEL = "kernels/test_model_call.py::"
PACKS = "kernels/test_native_linear.py::"
ROWS = "kernels/test_row_kernels.py::"


def fault(name: str, at: tuple[str, str, int], change: tuple[str, str], *tests: str) -> NativeMutant:
    """``at``: a file, the unit that is compiled, its level. ``change``: the text, and the fault."""
    return NativeMutant(
        name=name, file=f"kernels/cpu/{at[0]}", unit=at[1], level=at[2], old=change[0], new=change[1], tests=tests
    )


MUTANTS = (
    # Attention.
    fault(
        "a-window-of-one-key-more",
        ("paged_attention_items.h", "paged_attention_portable.cpp", PORTABLE),
        ("int64_t low = part.low[row] - block", "int64_t low = part.low[row] - 1 - block"),
        FEATURES,
        "kernels/test_paged_attention.py::test_unseen_rows_are_not_read",
    ),
    fault(
        "keys-past-a-page's-last-row",
        ("paged_attention_items.h", "paged_attention_portable.cpp", PORTABLE),
        ("address % size + GROUP <= size)", "address % size + GROUP <= size + 1)"),
        *ATTENTION,
    ),
    fault(
        "values-of-an-item's-first-head",
        ("paged_attention_items.h", "paged_attention_portable.cpp", PORTABLE),
        ("((const T*)call.v + head * call.v_head)", "((const T*)call.v + item.head * call.v_head)"),
        *ATTENTION,
    ),
    fault(
        "the-first-head's-learned-sink",
        ("paged_attention_items.h", "paged_attention_portable.cpp", PORTABLE),
        ("call.sinks[head] * LOG2E", "call.sinks[0] * LOG2E"),
        FEATURES,
    ),
    fault(
        "states-of-a-sink-where-those-of-others-are",
        ("paged_attention_items.h", "paged_attention_portable.cpp", PORTABLE),
        ("(batch.shift[item.part][row] + split)", "(batch.shift[0][row] + split)"),
        FEATURES,
        "kernels/test_paged_attention.py::test_random_plans",
    ),
    fault(
        "a-soft-cap-of-what-is-scaled-twice",
        ("paged_attention_items.h", "paged_attention_portable.cpp", PORTABLE),
        ("cap != 0.0f ? call.scale / call.softcap", "cap != 0.0f ? call.scale"),
        FEATURES,
    ),
    fault(
        "the-last-split-forgotten",
        ("paged_attention_items.h", "paged_attention_portable.cpp", PORTABLE),
        ("s < batch.count[row]; s++", "s + 1 < batch.count[row]; s++"),
        FEATURES,
        "kernels/test_paged_attention.py::test_shared_pages_do_not_matter",
    ),
    fault(
        "sums-of-a-row-that-are-not-cleared",
        ("paged_attention_body.h", "paged_attention_portable.cpp", PORTABLE),
        ("std::memset(sums, 0, 4 * rows * room.columns)", "std::memset(sums, 0, 4 * (rows - 1) * room.columns)"),
        *ATTENTION,
    ),
    fault(
        "the-rest-of-a-head's-columns",
        ("paged_attention_rows.h", "paged_attention_portable.cpp", PORTABLE),
        ("bytes - whole);", "bytes - whole - (int64_t)sizeof(T));"),
        "kernels/test_paged_attention.py::test_sizes_of_heads",
    ),
    fault(
        "a-split's-last-page-not-compared",
        ("paged_attention.cpp", "paged_attention.cpp", PORTABLE),
        ("(split_start(split + 1) + size - 1) / size;", "split_start(split + 1) / size;"),
        "kernels/test_paged_attention.py::test_shared_pages_do_not_matter",
    ),
    fault(
        "the-sight-of-half-a-block",
        ("paged_attention_tiles.h", "paged_attention_emulated.cpp", EMULATED),
        ("bits[1][lane] = (uint32_t)(mine >> 32);", "bits[1][lane] = (uint32_t)mine;"),
        "kernels/test_paged_attention.py::test_lengths",
        FEATURES,
    ),
    # Mixers.
    fault(
        "a-state-in-its-row's-first-slot",
        ("recurrence_body.h", "recurrence_avx2.cpp", AVX2),
        ("nullptr : at(forward.targets[row + rows]);", "nullptr : at(forward.targets[row]);"),
        *MIXERS,
    ),
    fault(
        "the-oldest-inputs-in-place-of-the-last",
        ("recurrence_body.h", "recurrence_avx2.cpp", AVX2),
        ("state + (t + taps - 1 - tap) * mixer.channels", "state + t * mixer.channels"),
        *MIXERS,
    ),
    fault(
        "the-odd-key-forgotten",
        ("recurrence_body.h", "recurrence_avx2.cpp", AVX2),
        ("if (i < keys) sum[n] +=", "if (i + 1 < keys) sum[n] +="),
        *MIXERS,
    ),
    fault(
        "the-keys-of-another-group",
        ("recurrence_body.h", "recurrence_avx2.cpp", AVX2),
        ("group = h / (heads / mixer.key_heads)", "group = h % mixer.key_heads"),
        *MIXERS,
    ),
    # Rows between products.
    fault(
        "the-last-square-forgotten",
        ("rows.h", "rows.cpp", PORTABLE),
        (
            "for (; i < count; i++) sum += wide_one(x + i) * wide_one(x + i);",
            "for (; i + 1 < count; i++) sum += wide_one(x + i) * wide_one(x + i);",
        ),
        ROWS + "test_norms",
    ),
    fault(
        "the-sine-of-the-other-half",
        ("rows.h", "rows.cpp", PORTABLE),
        ("high * cos[half + i] + low * sin[half + i]", "high * cos[half + i] + low * sin[i]"),
        ROWS + "test_heads_are_placed",
    ),
    fault(
        "a-row-of-two-threads",
        ("rows.h", "rows.cpp", PORTABLE),
        ("first + piece < count ? first + piece : count", "first + piece < count ? first + piece + 1 : count"),
        ROWS + "test_scaled_sums_do_not_depend_on_the_place",
        ROWS + "test_rows_are_the_same_in_any_batch_to_the_bit",
    ),
    fault(
        "values-in-the-slot-before",
        ("rows.h", "rows.cpp", PORTABLE),
        ("copy(work.v + slot * numbers", "copy(work.v + (slot ? slot - 1 : 0) * numbers"),
        ROWS + "test_heads_are_placed",
    ),
    # Blocks and models.
    fault(
        "decodes-with-a-window-of-one-key-less",
        ("block.cpp", "block.cpp", PORTABLE),
        ("high[t] - decodes->window : 0", "high[t] + 1 - decodes->window : 0"),
        MODEL + "test_decodes_in_their_place_are_those_planned_anew",
    ),
    fault(
        "the-last-of-equal-logits",
        ("model_ends.h", "block.cpp", PORTABLE),
        ("(most[j] == best && at[j] < place)", "(most[j] == best && at[j] > place)"),
        MODEL + "test_first_maxima",
    ),
    fault(
        "gates-of-the-head-before",
        ("block_heads.h", "block.cpp", PORTABLE),
        ("block.rates ? 1 : 2 * layer.key_width", "block.rates ? 1 : layer.key_width"),
        "kernels/test_mixed_blocks.py::test_attention_with_gates",
    ),
    # Experts.
    fault(
        "tokens-of-another-expert",
        ("experts_run.h", "experts.cpp", PORTABLE),
        ("from = gathered + copied * width;", "from = gathered + taken * width;"),
        "kernels/test_native_experts.py::test_every_number_is_that_of_the_parts",
    ),
    fault(
        "weights-with-their-correction",
        ("experts_route.h", "experts.cpp", PORTABLE),
        ("routing.correction ? logits[chosen[k]] : queue[k].first", "queue[k].first"),
        "kernels/test_native_experts.py::test_a_choice_is_that_of_the_reference_ties_included",
    ),
    fault(
        "the-odd-token's-logits",
        ("experts.h", "experts.cpp", PORTABLE),
        ("if (token < end) logits_of<1>", "if (token + 1 < end) logits_of<1>"),
        "kernels/test_native_experts.py::test_sums_of_a_router_are_those_of_float64",
    ),
    # Linear maps.
    fault(
        "the-rest-of-the-last-row",
        ("linear_by_tiles.h", "linear_tiles_emulated.cpp", EMULATED),
        (
            "for (int64_t m = 0; m < rows; m++) std::memcpy(last_x",
            "for (int64_t m = 0; m + 1 < rows; m++) std::memcpy(last_x",
        ),
        PACKS + "test_tiles_touch_only_what_is_theirs",
    ),
    fault(
        "the-first-panel's-bias",
        ("linear_outputs.h", "linear_tiles_emulated.cpp", EMULATED),
        ("sums[o] + map.bias[from + o]", "sums[o] + map.bias[o]"),
        PACKS + "test_products",
    ),
    fault(
        "rows-of-heads-side-by-side",
        ("linear_heads.cpp", "linear_heads.cpp", PORTABLE),
        ("calls[h].y_stride = y_stride;", "calls[h].y_stride = map.outputs;"),
        PACKS + "test_heads_have_maps_of_their_own",
    ),
    fault(
        "the-items-of-a-last-range",
        ("linear.h", "linear_portable.cpp", PORTABLE),
        ("end = call.items * (range + 1) / call.ranges", "end = call.items / call.ranges * (range + 1)"),
        "kernels/test_native_experts.py::test_every_level_and_any_number_of_threads",
    ),
    fault(
        "the-last-of-an-odd-number-of-floats",
        ("linear_pack_body.h", "linear_pack_avx2.cpp", AVX2),
        ("for (; i < count; i++) rest |= loaded", "for (; i + 1 < count; i++) rest |= loaded"),
        PACKS + "test_one_number_that_bfloat16_lacks_keeps_a_weight_in_float32",
    ),
    fault(
        "a-scale-of-the-largest-number-above-0",
        ("linear_pack_body.h", "linear_pack_portable.cpp", PORTABLE),
        ("return most > -least ? most : least;", "return most;"),
        PACKS + "test_layouts_are_those_of_the_reference",
    ),
    fault(
        "the-minimum's-upper-bits-from-the-scale",
        ("linear_pack_blocks.cpp", "linear_pack_blocks.cpp", PORTABLE),
        ("(from[4 + g] >> 2 & 48)", "(from[g] >> 2 & 48)"),
        BLOCKS + "test_panels_hold_the_values",
    ),
    # Codes.
    fault(
        "whole-numbers-beyond-two-digits",
        ("linear_digits.h", "linear_avx2.cpp", AVX2),
        ("int32_t exponent = (largest + 66048) >> 23;", "int32_t exponent = largest >> 23;"),
        BLOCKS + "test_whole_numbers_multiply_codes",
    ),
    fault(
        "the-offset-of-half-a-group",
        ("linear_digits.h", "linear_avx2.cpp", AVX2),
        ("(digits.sums[HALF] + (IS_WHOLE ? digits.sums[1] : 0)) * Shape::OFFSET", "digits.sums[HALF] * Shape::OFFSET"),
        BLOCKS + "test_whole_numbers_multiply_codes",
    ),
    fault(
        "the-minimum-of-half-the-inputs",
        ("linear_digits.h", "linear_avx2.cpp", AVX2),
        ("x.sums[half] + (INPUTS == 32 ? x.sums[1] : 0)", "x.sums[half]"),
        BLOCKS + "test_whole_numbers_multiply_codes",
    ),
    fault(
        "the-scale-of-the-first-half",
        ("linear_blocks.h", "linear_portable.cpp", PORTABLE),
        ("scales + (SHAPE.is_halved ? half * PANEL : 0) + n * LANES", "scales + n * LANES"),
        BLOCKS + "test_products_are_those_of_the_expanded_weights",
    ),
    fault(
        "a-first-block-that-is-added",
        ("linear_tiles.h", "linear_portable.cpp", PORTABLE),
        ("const Sums to = {sums.to, sums.apart, k == 0,", "const Sums to = {sums.to, sums.apart, false,"),
        PACKS + "test_products",
    ),
    fault(
        "scales-of-the-first-panel-of-two",
        ("linear_tiles.h", "linear_portable.cpp", PORTABLE),
        ("map.scales + ((panel + q) * (map.inputs", "map.scales + (panel * (map.inputs"),
        PACKS + "test_products",
        PACKS + "test_rows_do_not_know_their_batch",
    ),
    fault(
        "a-scale-for-each-32-inputs",
        ("linear_code_groups.h", "linear_tiles_emulated.cpp", EMULATED),
        ("wide(scales + group * 32 / shared * PANEL", "wide(scales + group * PANEL"),
        PACKS + "test_products",
    ),
    fault(
        "the-sum-of-the-other-half",
        ("linear_code_groups.h", "linear_tiles_emulated.cpp", EMULATED),
        ("/ 16 + 1] = total(second)", "/ 16 + 1] = total(first)"),
        BLOCKS + "test_pairs_and_tiles_multiply_codes",
    ),
    # What is left.
    fault(
        "sums-of-all-rows-but-the-first-are-kept",
        ("low_rank_body.h", "low_rank_portable.cpp", PORTABLE),
        ("std::memset(sum, 0, sizeof(float) * M * outputs)", "std::memset(sum, 0, sizeof(float) * outputs)"),
        "adapters/test_native_low_rank.py::test_any_rows_give_what_the_reference_gives",
    ),
    fault(
        "the-last-inputs-of-a-low-rank-product",
        ("low_rank_body.h", "low_rank_portable.cpp", PORTABLE),
        ("for (int64_t j = i; j < inputs; j++)", "for (int64_t j = i; j + 1 < inputs; j++)"),
        "adapters/test_native_low_rank.py::test_any_rows_give_what_the_reference_gives",
    ),
    fault(
        "the-rank-of-the-union-before",
        ("merges.cpp", "merges.cpp", PORTABLE),
        ("if (best) parts[best - 1].rank =", "if (best > 1) parts[best - 1].rank ="),
        "kernels/test_merges.py::test_every_text_has_the_tokens_of_all_merges",
        "kernels/test_merges.py::test_each_merge_is_used_by_its_union",
    ),
    fault(
        "a-stripe-too-many",
        ("checked_rows.cpp", "checked_rows.cpp", PORTABLE),
        ("(size - 1 - BLOCK * blocks) / STRIPE", "(size - BLOCK * blocks) / STRIPE"),
        "kernels/test_checked_rows.py::test_the_checksum_is_that_of_state_files",
    ),
    fault(
        "time-that-is-up-is-taken-for-an-answer",
        ("waiting.cpp", "waiting.cpp", PORTABLE),
        ("return 0;", "return 1;"),
        "ranks/test_ranks.py::test_a_rank_that_hangs_ends_a_sum",
    ),
)

if __name__ == "__main__":
    sys.exit(main(MUTANTS))
