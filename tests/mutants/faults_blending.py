"""Faults of blending on plain tensors: the defects of other implementations, and some more."""

from tests.mutants.harness import Mutant

MODEL = "blend/test_blended_model.py"
BLENDER = "blend/test_tensor_blender.py"
SELECTION = "blend/test_selection.py"

MUTANTS = (
    Mutant(
        name="last-rows-may-be-left-out",
        file="blend/selection.py",
        old="must[-1] = True",
        new="pass",
        tests=(f"{SELECTION}::test_the_selection_of_lmcache_and_ours",),
    ),
    Mutant(
        name="questions-may-be-left-out",
        file="blend/selection.py",
        old="must[known.question_start :] = True",
        new="must[known.question_start : known.question_start + 1] = True",
        tests=(f"{SELECTION}::test_rows_are_those_of_the_definition",),
    ),
    Mutant(
        name="scores-that-are-no-numbers-are-lowest",
        file="blend/selection.py",
        old="np.where(np.isfinite(scores), scores, np.inf)",
        new="np.where(np.isfinite(scores), scores, -np.inf)",
        tests=(f"{SELECTION}::test_scores_that_are_no_numbers_are_the_highest",),
    ),
    Mutant(
        name="equal-scores-go-to-higher-rows",
        file="blend/selection.py",
        old='np.argsort(-scores[span], kind="stable")[:',
        new='np.argsort(scores[span], kind="stable")[::-1][:',
        tests=(f"{SELECTION}::test_equal_scores_go_to_the_lower_rows",),
    ),
    Mutant(
        name="budgets-are-shares-of-all-rows",
        file="blend/selection.py",
        old="int(self._first_counts[request])",
        new="int(self._bounds[request + 1] - self._bounds[request])",
        tests=(f"{SELECTION}::test_rows_are_those_of_the_definition",),
    ),
    Mutant(
        name="undefined-rows-are-multiplied-by-zero",
        file="blend/executor.py",
        old="return cached.movedim(0, token_dim).index_copy(token_dim, alive, fresh)",
        new="return (cached * torch.ones(len(cached), *[1] * (cached.dim() - 1)).index_fill(0, alive, 0)).movedim("
        "0, token_dim).index_add(token_dim, alive, fresh)",
        tests=(f"{MODEL}::test_rows_that_are_not_valid_do_not_matter",),
    ),
    Mutant(
        name="cached-rows-are-written-over",
        file="blend/executor.py",
        old=".index_copy(token_dim, alive, fresh)",
        new=".index_copy_(token_dim, alive, fresh)",
        tests=(f"{BLENDER}::test_nothing_that_is_given_is_changed",),
    ),
    Mutant(
        name="positions-of-a-batch-begin-at-0",
        file="blend/executor.py",
        old="positions=_checked_positions(positions, counts),",
        new="positions=np.concatenate([np.arange(one) for one in counts]),",
        tests=(f"{MODEL}::test_a_context_is_as_rows_that_were_forced",),
    ),
    Mutant(
        name="positions-are-the-callers",
        file="blend/executor.py",
        old='given.to("cpu", torch.int64, copy=True)',
        new='given.to("cpu", torch.int64)',
        tests=(f"{BLENDER}::test_positions_and_origins_are_those_of_the_call",),
    ),
    Mutant(
        name="forwards-go-on-with-the-last-one",
        file="blend/executor.py",
        old="        if layer_id == self._first:\n            counts",
        new="        if layer_id == self._first and forward is None:\n            counts",
        tests=(f"{MODEL}::test_executors_remember_nothing",),
    ),
    Mutant(
        name="what-is-told-holds-for-ever",
        file="blend/executor.py",
        old="self._forward, self._requests = forward, None",
        new="self._forward = forward",
        tests=(f"{BLENDER}::test_what_is_told_holds_for_one_forward",),
    ),
    Mutant(
        name="all-layers-have-the-table-of-the-first",
        file="blend/executor.py",
        old="        spec = self._layers[layer_id - self._first]\n",
        new="        spec = self._layers[0]\n",
        tests=(f"{MODEL}::test_true_rows_change_nothing",),
    ),
    Mutant(
        name="layers-share-the-move-of-another-table",
        file="blend/executor.py",
        old="move = forward.moves.get(spec.rope)",
        new="move = next(iter(forward.moves.values()), None)",
        tests=(f"{MODEL}::test_true_rows_change_nothing",),
    ),
    Mutant(
        name="cached-rows-at-the-check-layer",
        file="blend/executor.py",
        old="            forward.alive = forward.alive[kept]\n",
        new="            forward.alive = forward.alive[kept]\n"
        '            if "v" in cached:\n'
        '                v = _joined(cached["v"], fresh_v.index_select(token_dim, kept), kept, token_dim)\n',
        tests=(f"{MODEL}::test_at_the_check_layer_all_rows_are_right",),
    ),
    Mutant(
        name="counts-only-where-rows-were-left-out",
        file="blend/executor.py",
        old="query_start_loc=starts,\n            kept",
        new="query_start_loc=starts if len(kept) < count else None,\n            kept",
        tests=(f"{BLENDER}::test_nothing_retrieved_is_nothing_valid",),
    ),
    Mutant(
        name="moved-keys-grow-with-the-magnitude",
        file="blend/rotation.py",
        old="if magnitude != 1.0:",
        new="if magnitude > 99.0:",
        tests=("blend/test_rotation.py::test_moved_keys_are_those_of_their_new_place",),
    ),
    Mutant(
        name="keys-that-stay-are-turned-by-nothing",
        file="blend/rotation.py",
        old="if (shifts == 0).any():",
        new="if (shifts == 0).all():",
        tests=("blend/test_rotation.py::test_rows_that_stay_are_copied_to_the_bit",),
    ),
    Mutant(
        name="all-rows-move-as-the-first",
        file="blend/rotation.py",
        old="if (shifts == shifts[0]).all():",
        new="if (shifts == shifts[0]).any():",
        tests=("blend/test_rotation.py::test_moved_keys_are_those_of_their_new_place",),
    ),
    Mutant(
        name="wrong-and-read-instead-of-either",
        file="blend/scores.py",
        old="return 1 / places.amin(0)",
        new="return 1 / places.amax(0)",
        tests=("blend/test_scores.py::test_wrong_rows_and_read_rows_share_the_budget",),
    ),
    Mutant(
        name="undefined-deviations-are-lowest",
        file="blend/scores.py",
        old=".nan_to_num(nan=torch.inf)",
        new=".nan_to_num()",
        tests=("blend/test_scores.py::test_wrong_rows_and_read_rows_share_the_budget",),
    ),
    Mutant(
        name="executors-may-drop-rows-without-a-cached-one",
        file="blend/given_parts.py",
        old="np.isin(np.concatenate((must, lasts)), kept).all()",
        new="np.isin(lasts[:0], kept).all()",
        tests=("blend/test_given_parts.py::test_an_output_that_drops_a_row_that_must_run",),
    ),
    Mutant(
        name="the-lead-has-no-text",
        file="engine/blending.py",
        old="self.lead = (*start, *text)",
        new="self.lead = (*start,)",
        tests=("blend/test_blended_questions.py::test_the_lead_has_the_text",),
    ),
)
