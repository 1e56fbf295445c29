"""Faults of forwards of which only some rows go on."""

from __future__ import annotations

from tests.mutants.harness import Mutant

ANY_ROWS = "kv/test_narrowing.py::test_any_rows_of_any_batch"
COST = "kernels/test_attention_kernel.py::test_rows_that_are_no_neighbours_cost_what_they_see"

MUTANTS = (
    Mutant(
        name="keys-of-left-out-rows-forgotten",
        file="kv/plans.py",
        old="size, number, origins = page_size, batch.stored + batch.added, np.zeros(",
        new="size, number, origins = page_size, batch.stored + batch.counts, np.zeros(",
        tests=(ANY_ROWS,),
    ),
    Mutant(
        name="rotations-of-all-rows-for-some",
        file="kv/state_pass.py",
        old="        self._prepared.clear()\n        self._rotations.clear()\n",
        new="        self._prepared.clear()\n",
        tests=(ANY_ROWS,),
    ),
    Mutant(
        name="rows-that-run-in-the-first-slots",
        file="kv/state_pass.py",
        old="[slots_T.index_select(0, rows_S) for slots_T in self.slots]",
        new="[slots_T[: len(rows)] for slots_T in self.slots]",
        tests=(ANY_ROWS,),
    ),
    Mutant(
        name="layer-runs-without-the-rows-left-out",
        file="kv/state_pass.py",
        old="        if layer_id not in self.written:\n            self.chosen.require_given(layer_id)\n",
        new="",
        tests=("kv/test_narrowing.py::test_a_layer_that_lacks_rows_is_refused",),
    ),
    Mutant(
        name="some-rows-given-count-as-all",
        file="kv/chosen_rows.py",
        old="there = self.given(layer_id).copy()",
        new="there = np.ones(int(self._starts[-1]), dtype=np.bool_)",
        tests=("kv/test_narrowing.py::test_a_layer_that_lacks_rows_is_refused",),
    ),
    Mutant(
        name="rows-come-back",
        file="kv/chosen_rows.py",
        old="if self.rows is not None and not np.isin(rows, self.rows, assume_unique=True).all():",
        new="if False:",
        tests=("kv/test_narrowing.py::test_arguments",),
    ),
    Mutant(
        name="expanded-rows-of-all-taken-for-those-that-run",
        file="kv/state_pass.py",
        old="new = None if narrowed else expanded",
        new="new = expanded",
        tests=("kv/test_narrowing.py::test_latent_rows",),
    ),
    Mutant(
        name="blocks-as-if-rows-were-neighbours",
        file="kernels/attention/row_blocks.py",
        old="rows = width * (stop - start - 1) // (4 * moved)",
        new="rows = width // 4",
        tests=(COST,),
    ),
    Mutant(
        name="keys-gathered-for-each-block",
        file="kernels/attention/group_calls.py",
        old="if block.keys is not keys:",
        new="if True:",
        tests=(COST,),
    ),
)
