"""Faults of drafts: what is proposed, how it is verified, and what is taken back."""

from __future__ import annotations

from tests.mutants.harness import Mutant

TESTS, UNITS = "speculation/test_speculation.py", "speculation"
DRAFTS, STEPS, LOOKUP = "engine/drafts.py", "engine/steps.py", "speculation/lookup.py"
AUTOMATON, CONTROLLER = "speculation/suffix_automaton.py", "speculation/controller.py"
MUTANTS = (
    Mutant(
        name="drafts-count-whatever-is-drawn",
        file=STEPS,
        old="matched = number < len(drafts) and token == drafts[number]",
        new="matched = number < len(drafts)",
        tests=(f"{TESTS}::test_each_depth",),
    ),
    Mutant(
        name="drafts-that-are-wrong-stay",
        file=STEPS,
        old="        for request in flight.drafted:\n            if not request.finished:\n",
        new="        for request in flight.drafted:\n            if False:\n",
        tests=(f"{TESTS}::test_each_depth",),
    ),
    Mutant(
        name="drafts-behind-a-stop-stay",
        file="engine/in_flight.py",
        old="if ahead or request in self.reading.drafted:",
        new="if ahead:",
        tests=(f"{TESTS}::test_stops_cut_within_drafts",),
    ),
    Mutant(
        name="drafts-of-recurrent-layers-are-chains",
        file="engine/step_builder.py",
        old="        if draft and trees:\n",
        new="        if False:\n",
        tests=(f"{TESTS}::test_nothing_runs_twice",),
    ),
    Mutant(
        name="drafts-of-a-tree-keep-a-node-less",
        file="branches/pool.py",
        old="self.apply(Commit((branch.seq,), (kept - 1,)))\n            held += kept",
        new="self.apply(Commit((branch.seq,), (kept - 2,)))\n            held += kept - 1",
        tests=(f"{TESTS}::test_interrupted_while_tokens_are_taken",),
    ),
    Mutant(
        name="drafts-go-beyond-the-last-token",
        file=DRAFTS,
        old="room = min(room, params.max_tokens - len(request.output.token_ids) - 1)",
        new="room = min(room, params.max_tokens)",
        tests=(f"{TESTS}::test_more_drafts_than_asked_for_are_cut",),
    ),
    Mutant(
        name="drafts-outside-of-the-vocabulary-run",
        file=DRAFTS,
        old="bad = [token for token in tokens if not 0 <= token < self._vocab_size]",
        new="bad = list[int]()",
        tests=(f"{TESTS}::test_a_proposer_that_fails_is_dropped",),
    ),
    Mutant(
        name="drafts-are-wanted-of-who-left-them-out",
        file=DRAFTS,
        old='output.wants != "last" or not params.speculative',
        new='output.wants != "last"',
        tests=(f"{TESTS}::test_off_for_a_request",),
    ),
    Mutant(
        name="drafts-take-the-slots-of-others",
        file=DRAFTS,
        old="not self.are_trees or 2 * nodes <= spare",
        new="True",
        tests=(f"{TESTS}::test_many_recurrent_requests_in_few_slots",),
    ),
    Mutant(
        name="drafts-of-one-salt-are-seen-by-all",
        file=LOOKUP,
        old="outputs = self._outputs.get(context.salt)",
        new="outputs = next(iter(self._outputs.values()), None)",
        tests=(f"{UNITS}/test_lookup.py::TestOutputs",),
    ),
    Mutant(
        name="drafts-cross-the-gap-between-outputs",
        file=LOOKUP,
        old="if token < 0), len(found))",
        new="if token < -9), len(found))",
        tests=(f"{UNITS}/test_lookup.py::TestOutputs",),
    ),
    Mutant(
        name="automata-never-split",
        file=AUTOMATON,
        old="if length[after] > length[state] + 1:",
        new="if False:",
        tests=(f"{UNITS}/test_suffix_automaton.py",),
    ),
    Mutant(
        name="walkers-stay-where-a-state-was-split",
        file=AUTOMATON,
        old="        while state and length <= self._length[self._link[state]]:\n            state = self._link[state]\n",
        new="",
        tests=(f"{UNITS}/test_suffix_automaton.py",),
    ),
    Mutant(
        name="drafts-are-taken-whatever-they-cost",
        file=CONTROLLER,
        old="rate = tokens / (own + seconds(rows + count) - without)",
        new="rate = tokens / own",
        tests=(f"{UNITS}/test_controller.py",),
    ),
    Mutant(
        name="promises-that-are-not-kept-are-believed",
        file=CONTROLLER,
        old="return min(1.0, (self.accepted + 1) / (self.promised + 1))",
        new="return 1.0",
        tests=(f"{UNITS}/test_controller.py::TestTrust", f"{TESTS}::test_garbage_is_soon_left"),
    ),
)
