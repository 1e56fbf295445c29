"""Faults of the attention by FlashInfer, as what stands for it shows them."""

from __future__ import annotations

from tests.mutants.harness import Mutant

TESTS = "kernels/test_flashinfer_attention.py"
FILE = "kernels/attention/flashinfer_attention.py"
MUTANTS = (
    Mutant(
        name="flashinfer-lse-to-base-2",
        file=FILE,
        old="lse_TH.mul_(math.log(2)) if lse else lse_TH",
        new="lse_TH",
        tests=(f"{TESTS}::test_each_feature",),
    ),
    Mutant(
        name="flashinfer-windows-have-a-key-too-many",
        file=FILE,
        old="end_R - 1 - last_R, -1)",
        new="end_R - last_R, -1)",
        tests=(f"{TESTS}::test_each_feature",),
    ),
    Mutant(
        name="flashinfer-runs-go-on-in-the-next-entry",
        file=FILE,
        old="seen_T[1:] & seen_T[:-1] & (entry_T[1:] == entry_T[:-1])",
        new="seen_T[1:] & seen_T[:-1]",
        tests=(f"{TESTS}::test_random_plans",),
    ),
    Mutant(
        name="flashinfer-rows-of-a-run-have-windows-of-their-own",
        file=FILE,
        old="(rise == 1) & ((shift == 1) | (low_T[1:] + low_T[:-1] == 0))",
        new="(rise == 1)",
        tests=(f"{TESTS}::test_random_plans",),
    ),
    Mutant(
        name="flashinfer-reads-what-lies-behind-a-sink",
        file=FILE,
        old="size = plan.page_size if plan.sinks is None else 1",
        new="size = plan.page_size",
        tests=(f"{TESTS}::test_rows_behind_a_sink_are_not_read",),
    ),
    Mutant(
        name="flashinfer-single-rows-see-the-whole-first-page",
        file=FILE,
        old="np.where(many_R | (begin_R % size == 0), size, 1)",
        new="np.full_like(window_R, size)",
        tests=(f"{TESTS}::test_each_feature",),
    ),
    Mutant(
        name="flashinfer-asks-for-rows-that-see-nothing",
        file=FILE,
        old="seeing, keys = np.flatnonzero(visible.any(1)),",
        new="seeing, keys = np.arange(len(visible)),",
        tests=(f"{TESTS}::test_random_plans",),
    ),
    Mutant(
        name="flashinfer-masks-take-the-kernels-of-chunks",
        file=FILE,
        old="kind = (form.kernels, shape.size, prepared.dtype)",
        new="kind = (shape.size, prepared.dtype)",
        tests=(f"{TESTS}::test_random_plans",),
    ),
    Mutant(
        name="flashinfer-wrappers-do-not-return",
        file=FILE,
        old="idle.setdefault(kind, []).append(held)",
        new="del kind, held",
        tests=(f"{TESTS}::test_layers_of_one_shape_are_planned_once_and_wrappers_return",),
    ),
    Mutant(
        name="flashinfer-plans-share-a-wrapper",
        file=FILE,
        old="held = idle.pop() if idle else",
        new="held = idle[-1] if idle else",
        tests=(f"{TESTS}::test_layers_of_one_shape_are_planned_once_and_wrappers_return",),
    ),
    Mutant(
        name="flashinfer-caps-no-scores-and-says-nothing",
        file=FILE,
        old="        if scoring.softcap is not None:\n            raise Unsupported(CAPPED)\n",
        new="",
        tests=(f"{TESTS}::test_scores_are_not_capped_by_an_approximate_tanh",),
    ),
)
