"""Faults of the Triton kernels, as their interpreter runs them."""

from __future__ import annotations

from tests.mutants.harness import Mutant

TESTS = "kernels/test_triton_attention.py"
SIZES = "runner/test_graph_runner.py::test_no_more_sizes_are_kept_than_asked_for"
STATIC = "kv/static_pass.py"
PROGRAMS = "kernels/attention/attention_programs.py"
MUTANTS = (
    Mutant(
        name="triton-rows-see-the-key-behind-them",
        file=PROGRAMS,
        old="(address_N[None, :] < high_M[:, None])",
        new="(address_N[None, :] <= high_M[:, None])",
        tests=(f"{TESTS}::test_each_feature",),
    ),
    Mutant(
        name="triton-sums-do-not-fade",
        file=PROGRAMS,
        old="sum_MV = sum_MV * fade_M[:, None]\n        if SHARED:",
        new="if SHARED:",
        tests=(f"{TESTS}::test_sizes_of_models",),
    ),
    Mutant(
        name="triton-merge-forgets-the-learned-logit",
        file=PROGRAMS,
        old="        total = 1.0\n",
        new="        total = 0.0\n",
        tests=(f"{TESTS}::test_each_feature",),
    ),
    Mutant(
        name="triton-reads-null-pages",
        file=PROGRAMS,
        old="known_N = known_N & (page_N >= 0)",
        new="known_N = known_N & (page_N >= -1)",
        tests=(f"{TESTS}::test_null_pages_are_not_read",),
    ),
    Mutant(
        name="triton-second-piece-of-keys-is-not-asked",
        file=PROGRAMS,
        old="s_MN = tl.dot(q_rest_MD, tl.trans(rest_ND), s_MN",
        new="tl.dot(q_rest_MD, tl.trans(rest_ND), s_MN",
        tests=(f"{TESTS}::test_sizes_of_models",),
    ),
    Mutant(
        name="triton-middle-of-an-item-begins-too-early",
        file="kernels/attention/tiles.py",
        old="plain_first = -(-np.maximum(reach.plain_first_N[tile], first) // block) * block",
        new="plain_first = np.maximum(reach.plain_first_N[tile], first) // block * block",
        tests=(f"{TESTS}::test_items_meet_each_key_once",),
    ),
    Mutant(
        name="triton-every-layer-uploads",
        file="kernels/attention/triton_attention.py",
        old="found = prepared.bound[shape] = self._bind(prepared, shape)",
        new="found = prepared.bound[(*shape, len(prepared.bound))] = self._bind(prepared, shape)",
        tests=(f"{TESTS}::test_a_forward_is_bound_once_for_layers_of_one_shape",),
    ),
    Mutant(
        name="captured-tokens-stay",
        file="runner/graph.py",
        old="captured.static.tokens.fill(np.concatenate(",
        new="captured.is_warm or captured.static.tokens.fill(np.concatenate(",
        tests=(SIZES,),
    ),
    Mutant(
        name="captured-positions-stay",
        file=STATIC,
        old="        self._positions.fill(self._real.positions)",
        new="        self._static.pass_ or self._positions.fill(self._real.positions)",
        tests=(SIZES,),
    ),
    Mutant(
        name="captured-slots-stay",
        file=STATIC,
        old="            part.fill(slots,",
        new="            self._static.pass_ or part.fill(slots,",
        tests=(SIZES,),
    ),
    Mutant(
        name="captured-rotations-stay",
        file=STATIC,
        old="        self._rotations.clear()\n",
        new="",
        tests=(SIZES,),
    ),
    Mutant(
        name="captured-plans-stay",
        file="kernels/attention/triton_attention.py",
        old="            parts.fill(self._numbers(prepared, shape), prepared, prepared.memory)",
        new="            prepared.memory.append(self._numbers(prepared, shape).tables)",
        tests=(SIZES,),
    ),
    Mutant(
        name="captured-states-stay",
        file=STATIC,
        old="        self._written.fill(opened.targets,",
        new="        self._written.tensor.any() or self._written.fill(opened.targets,",
        tests=("runner/test_graph_runner.py::test_a_failed_step_is_undone",),
    ),
    Mutant(
        name="triton-keys-turn-without-their-norm",
        file="kernels/rows/row_programs.py",
        old="weight_HW += tl.load(k_weight + there_HW",
        new="weight_HW += 0 * tl.load(k_weight + there_HW",
        tests=("kernels/test_row_kernels.py::test_heads_are_placed",),
    ),
    Mutant(
        name="triton-chunks-forget-the-state-that-fades",
        file="kernels/recurrence/recurrence_programs.py",
        old="state_KW = state_KW * tl.load(since + last * HEADS + h)",
        new="state_KW = state_KW * 0 * tl.load(since + last * HEADS + h)",
        tests=("kernels/test_triton_recurrence.py::test_ragged_batches",),
    ),
    Mutant(
        name="triton-blocks-of-the-inverse-are-not-joined",
        file="kernels/recurrence/recurrence_programs.py",
        old="(side[:, None] > side[None, :])",
        new="(side[:, None] > side[None, :] + 1)",
        tests=("kernels/test_triton_recurrence.py::test_systems_far_from_the_identity",),
    ),
    Mutant(
        name="triton-left-halves-fade-too-early",
        file="kernels/recurrence/recurrence_programs.py",
        old="until_CK += tl.where(right[:, None], 0.0, right_BK)",
        new="until_CK += tl.where(right[:, None], right_BK, 0.0)",
        tests=("kernels/test_triton_recurrence.py::test_wanted_rows_within_chunks",),
    ),
    Mutant(
        name="triton-branches-start-from-the-row-before",
        file="kernels/recurrence/recurrence_programs.py",
        old="if source < -1:",
        new="if source < -100:",
        tests=("kernels/test_triton_recurrence.py::test_trees",),
    ),
    Mutant(
        name="triton-every-recurrent-layer-uploads",
        file="kernels/recurrence/triton_recurrence.py",
        old="if held is None or held[0] is not plan or held[1] != device:",
        new="if held is None or held[0] is plan or held[1] != device:",
        tests=("kernels/test_triton_recurrence.py::test_layers_of_a_forward_share_what_is_uploaded",),
    ),
)
