"""Faults of drafts: what is proposed, how it is verified, and what is taken back."""

from __future__ import annotations

from tests.mutants.harness import Mutant

TESTS, UNITS = "engine/test_speculation.py", "speculation"
DRAFTS, STEPS, LOOKUP = "engine/drafts.py", "engine/steps.py", "speculation/lookup.py"
HEADS, HEAD_TESTS = "speculation/heads.py", "engine/test_heads.py"
RIGHT = f"{HEAD_TESTS}::test_a_head_that_is_right_is_always_accepted"
FIRST = f"{HEAD_TESTS}::test_each_first_draft_is_that_of_the_definition"
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
        name="heads-read-the-hidden-state-before",
        file=HEADS,
        old="reader.states_NE[start - reader.first : start - reader.first + count]",
        new="reader.states_NE[max(0, start - reader.first - 1) :][:count]",
        tests=(RIGHT,),
    ),
    Mutant(
        name="heads-read-the-token-of-the-hidden-state",
        file=HEADS,
        old="reader.tokens.ids[start + 1 : start + 1 + count].copy()",
        new="reader.tokens.ids[start : start + count].copy()",
        tests=(FIRST,),
    ),
    Mutant(
        name="heads-keep-the-rows-of-drafts",
        file=HEADS,
        old="            for reader in readers:\n                self._pop(reader)",
        new="            for reader in readers:\n                reader.num_run = self._state.sequence_length(reader.seq)",
        tests=(FIRST,),
    ),
    Mutant(
        name="heads-keep-hidden-states-of-rejected-drafts",
        file=HEADS,
        old="self.states_NE = self.states_NE[: max(0, count - self.first)]",
        new="pass",
        tests=(f"{UNITS}/test_heads.py",),
    ),
    Mutant(
        name="heads-go-on-where-hidden-states-are-missing",
        file=HEADS,
        old="        if self.known < start:",
        new="        if False:",
        tests=(f"{UNITS}/test_heads.py",),
    ),
    Mutant(
        name="heads-keep-the-row-of-another-token",
        file=HEADS,
        old="self.num_run = min(self.num_run, max(0, count - 1 - self.begin))",
        new="self.num_run = min(self.num_run, max(0, count - self.begin))",
        tests=(f"{UNITS}/test_heads.py",),
    ),
    Mutant(
        name="heads-go-on-from-requests-of-another-salt",
        file=HEADS,
        old="is_there = self.salt == rows.context.salt and",
        new="is_there =",
        tests=(f"{UNITS}/test_heads.py",),
    ),
    Mutant(
        name="heads-begin-anew-in-each-turn",
        file=HEADS,
        old="if rows.start and one.has(rows)]",
        new="if not rows.start and one.has(rows)]",
        tests=(f"{HEAD_TESTS}::test_turns_and_samples_go_on_with_the_context",),
    ),
    Mutant(
        name="heads-are-not-told-of-cancelled-prompts",
        file=DRAFTS,
        old="return wanted and not self.of(request).dropped",
        new="return wanted",
        tests=(f"{HEAD_TESTS}::test_cancelled_between_drafts",),
    ),
    Mutant(
        name="heads-let-hidden-states-of-prompts-wait",
        file=HEADS,
        old="if stop - reader.next <= self._most_waiting:",
        new="if True:",
        tests=(f"{HEAD_TESTS}::test_hidden_states_that_wait_are_few",),
    ),
    Mutant(
        name="heads-draft-their-own-ids",
        file="models/eagle.py",
        old="return list(tokens) if self.ids is None else",
        new="return list(tokens) if True else",
        tests=(RIGHT,),
    ),
    Mutant(
        name="eagle-heads-go-on-from-the-normed-state",
        file="models/eagle.py",
        old="        return y_TE\n\n    def head",
        new="        return self.norm(y_TE) * 0\n\n    def head",
        tests=(RIGHT,),
    ),
    Mutant(
        name="mtp-heads-read-the-state-before-the-norm",
        file="models/mtp.py",
        old="return self.target_norm(features[0]).to(self.dtype)",
        new="return features[0].to(self.dtype)",
        tests=(f"{HEAD_TESTS}::test_logits_are_those_of_the_definition",),
    ),
    Mutant(
        name="mtp-heads-join-state-and-embedding",
        file="models/mtp.py",
        old="(self.embedding_norm(e_TE), self.state_norm(h_TE))",
        new="(self.state_norm(h_TE), self.embedding_norm(e_TE))",
        tests=(f"{HEAD_TESTS}::test_logits_are_those_of_the_definition",),
    ),
    Mutant(
        name="outputs-are-those-of-the-next-block",
        file="kernels/block.py",
        old="                found.append(x_TE)\n                start = block + 1",
        new="                found.append(x_TE)\n                start = block",
        tests=(f"{HEAD_TESTS}::test_logits_are_those_of_the_definition",),
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
