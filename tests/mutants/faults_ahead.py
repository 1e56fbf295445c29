"""Faults of steps that run ahead of their tokens, and of penalties counted on the device."""

from __future__ import annotations

from tests.mutants.harness import Mutant

TURNS = "engine/test_decode_turns.py"
TESTS, SEEN = "engine/test_steps_ahead.py", "sampling/test_seen_tokens.py"
STEPS, DRAWS, TABLE = "engine/steps.py", "sampling/draws.py", "sampling/seen_tokens.py"
MUTANTS = (
    Mutant(
        name="ahead-nothing-is-taken-back",
        file="engine/requests.py",
        old="        self.in_flight.withdraw(request)\n",
        new="",
        tests=(f"{TESTS}::test_a_stop_is_seen_a_step_late",),
    ),
    Mutant(
        name="ahead-what-is-drawn-again-goes-on",
        file=STEPS,
        old="            if request in redrawn or request.finished:\n",
        new="            if request.finished:\n",
        tests=(f"{TESTS}::test_a_wide_nucleus_draws_again",),
    ),
    Mutant(
        name="ahead-what-was-taken-back-runs-ahead",
        file=STEPS,
        old="        if any(not ready[row].finished for row in flight.drawing.discarded):\n            return",
        new="        if False:\n            return",
        tests=(f"{TESTS}::test_others_go_on_while_a_wide_nucleus_draws_again",),
    ),
    Mutant(
        name="ahead-random-numbers-are-lost",
        file=DRAWS,
        old="self._samplers[row].rollback(self._uniforms.pop(row))",
        new="self._uniforms.pop(row)",
        tests=(f"{TESTS}::test_random_numbers_go_back_in_their_order",),
    ),
    Mutant(
        name="ahead-the-last-token-is-not-known",
        file="engine/sampling_step.py",
        old="count == params.max_tokens or len(request.branch.tokens) + 1 >= request.asked.limit",
        new="count == params.max_tokens",
        tests=(f"{TESTS}::test_the_context_ends",),
    ),
    Mutant(
        name="ahead-nobody-looks-at-the-queue",
        file="engine/in_flight.py",
        old="return scheduler.lacks_room and self._steps % PATIENCE != 0",
        new="return scheduler.lacks_room",
        tests=(f"{TESTS}::test_who_waits_for_pages_is_looked_at_again",),
    ),
    Mutant(
        name="ahead-who-comes-waits",
        file="engine/in_flight.py",
        old="        if not scheduler.waiting:",
        new="        if True:",
        tests=(f"{TESTS}::test_who_waits_for_pages_is_looked_at_again",),
    ),
    Mutant(
        name="ahead-a-failed-step-leaves-its-tokens",
        file=STEPS,
        old="            for request in scheduled.requests:\n                self.branches.rollback(request.branch, request.branch.computed)\n            return\n",
        new="            return\n",
        tests=(f"{TESTS}::test_a_step_ahead_that_fails_runs_again",),
    ),
    Mutant(
        name="ahead-windows-have-no-slack",
        file="kv/forward_need.py",
        old="max(0, sequence.length - slack)",
        new="sequence.length",
        tests=(f"{TESTS}::test_a_window_keeps_what_the_last_token_needs",),
    ),
    Mutant(
        name="ahead-captured-steps-take-old-tokens",
        file="runner/graph.py",
        old="            self.static.tokens.tensor[: len(drawn)].copy_(drawn)\n",
        new="            pass\n",
        tests=("runner/test_graph_runner.py::test_tokens_of_the_device_are_one_for_each",),
    ),
    Mutant(
        name="penalties-count-what-was-read-twice",
        file=TABLE,
        old="            for row in rows:\n                row.counted += 1\n",
        new="",
        tests=(f"{SEEN}::test_tokens_that_nobody_has_read_count",),
    ),
    Mutant(
        name="penalties-a-row-keeps-what-it-had",
        file=TABLE,
        old="        self._seen_SV.index_fill_(0, uploaded_rows(slots, self._seen_SV.device), 0)\n",
        new="",
        tests=(f"{SEEN}::test_requests_come_and_go",),
    ),
    Mutant(
        name="penalties-prompts-count-as-output",
        file=TABLE,
        old="PROMPT, OUTPUT = 1, 2",
        new="PROMPT, OUTPUT = 2, 2",
        tests=(f"{SEEN}::test_requests_come_and_go",),
    ),
    Mutant(
        name="penalties-nothing-bounds-them",
        file="kernels/draw/penalty_programs.py",
        old="new_B = tl.where(new_B > LARGEST, LARGEST, new_B)",
        new="new_B = new_B",
        tests=(f"{SEEN}::test_requests_come_and_go",),
    ),
    Mutant(
        name="turns-uneven-groups-stay",
        file="engine/decode_turns.py",
        old="is_uneven = 2 * self._runner.stages * len(group) <= total",
        new="is_uneven = False",
        tests=(f"{TURNS}::test_uneven_groups_are_made_anew",),
    ),
    Mutant(
        name="turns-interrupted-steps-stay",
        file="engine/in_flight.py",
        old="        self.turns.clear()\n",
        new="",
        tests=(f"{TURNS}::test_interrupted_turns_run_again", f"{TURNS}::test_closed_while_others_have_their_turn"),
    ),
    Mutant(
        name="turns-one-group-runs-alone",
        file="engine/decode_turns.py",
        old="if not others or is_uneven",
        new="if is_uneven",
        tests=(f"{TURNS}::test_a_group_that_is_left_alone_is_divided",),
    ),
)
