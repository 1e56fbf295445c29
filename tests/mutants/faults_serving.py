"""Faults of the runner, the executor and the engine."""

from __future__ import annotations

from tests.mutants.harness import Mutant

EXECUTOR = (
    Mutant(
        name="placeholders-not-replaced",
        file="runner/local.py",
        old="return x_TE.index_copy(0, rows, extras.embeddings.to(x_TE.device, x_TE.dtype))",
        new="return x_TE",
        tests=("test_local_runner.py::test_embeddings_stand_at_placeholders",),
    ),
    Mutant(
        name="embeddings-of-another-piece",
        file="executor/media.py",
        old="return self.embeddings_mE[first:last]",
        new="return self.embeddings_mE[: last - first]",
        tests=("executor/test_media.py::test_rows_stand_at_their_placeholders",),
    ),
    Mutant(
        name="padding-enters-the-cache",
        file="contracts/executor_calls.py",
        old="return tuple((a, a + n) for a, n in",
        new="return tuple((a, columns) for a, n in",
        tests=("executor/test_model_executor.py::test_masks_left_and_right",),
    ),
    Mutant(
        name="nodes-verified-as-a-chain",
        file="executor/transaction.py",
        old="tree = None if part.parents is None else TokenTree(part.parents)",
        new="tree = None if part.parents is None else TokenTree(tuple(range(-1, len(part.parents) - 1)))",
        tests=("executor/test_trees.py::test_each_path_equals_that_path_alone",),
    ),
    Mutant(
        name="way-back-not-kept-under-windows",
        file="executor/transaction.py",
        old="return self._lets_go or self.pool.shares_tail(part.row.seq)",
        new="return self.pool.shares_tail(part.row.seq)",
        tests=("executor/test_windows.py::test_a_failure_in_a_late_forward_is_undone",),
    ),
)

SESSIONS = (
    Mutant(
        name="matches-beyond-the-reach-of-a-window",
        file="engine/prefix_cache.py",
        old="(position := self._reach(seq, min(length, below.end))) > found",
        new="(position := min(length, below.end)) > found",
        tests=("test_gaps.py::test_under_windows_a_match_is_where_some_sequence_can_be_forked",),
    ),
    Mutant(
        name="covered-sequences-forgotten-under-windows",
        file="engine/prefix_cache.py",
        old="return [] if live else list(node.sequences.values())",
        new="return list(_sequences_above(node))",
        tests=("test_gaps.py::test_under_windows_a_longer_sequence_does_not_replace_a_shorter_one",),
    ),
    Mutant(
        name="lost-position-counts-as-computed",
        file="engine/session_states.py",
        old="            self.cache.truncate(seq, kept)\n        return kept",
        new="            self.cache.truncate(seq, kept)\n        return length",
        tests=("engine/test_windowed_sessions.py::test_rewind_within_and_behind_the_window",),
    ),
    Mutant(
        name="fork-counts-what-a-window-lost",
        file="engine/session_states.py",
        old="child.seq, child.computed = seq, length",
        new="child.seq, child.computed = seq, min(parent.computed, length + 1)",
        tests=("engine/test_sessions.py::test_fork",),
    ),
    Mutant(
        name="window-forgotten-when-computed-again",
        file="engine/scheduler.py",
        old="            if request.window is not None:\n                self._apply(Window",
        new="            if request.window is not None and not request.num_preemptions:\n                self._apply(Window",
        tests=("test_gaps.py::test_a_session_with_a_window_that_is_preempted_keeps_its_window",),
    ),
    Mutant(
        name="windowed-session-is-a-prefix-for-others",
        file="engine/session_states.py",
        old="work.cacheable = not session.modified and session.window is None",
        new="work.cacheable = not session.modified",
        tests=("engine/test_windowed_sessions.py::test_shares_no_prefix_with_sessions_without_a_window",),
    ),
)

ENGINE = (
    Mutant(
        name="the-oldest-is-preempted",
        file="engine/scheduler.py",
        old="youngest = (loose or self.running)[-1]",
        new="youngest = (loose or self.running)[0]",
        tests=("engine/test_scheduler.py::test_the_youngest_is_preempted_and_comes_back_first",),
    ),
    Mutant(
        name="prompts-hold-up-decodes",
        file="engine/scheduler.py",
        old="sorted(self.running, key=lambda running: running.remaining > 1)",
        new="sorted(self.running, key=lambda running: running.remaining <= 1)",
        tests=("engine/test_scheduler.py::test_decodes_come_first_and_prompts_are_cut",),
    ),
    Mutant(
        name="prompt-logprobs-from-the-cache",
        file="engine/scheduler.py",
        old="return limit if request.fresh_from is None else min(limit, request.fresh_from)",
        new="return limit",
        tests=("engine/test_scheduler.py::test_fresh_tokens_are_run_whatever_is_cached",),
    ),
    Mutant(
        name="grammar-not-applied-to-the-first-token",
        file="engine/drawing.py",
        old="for row, request in enumerate(ready) if request.matcher is not None}",
        new="for row, request in enumerate(ready) if request.matcher is not None and request.output_ids}",
        tests=("engine/test_structured.py::test_samples_are_in_the_language",),
    ),
    Mutant(
        name="grammar-not-advanced",
        file="engine/drawing.py",
        old="                seconds = request.matcher.accept(token)\n",
        new="                seconds = 0.0\n",
        tests=("engine/test_structured.py::test_samples_are_in_the_language",),
    ),
    Mutant(
        name="masks-of-grammars-shifted-by-a-row",
        file="engine/structured.py",
        old="in zip(masks_MB, matchers.items(), strict=True):",
        new="in zip(np.roll(masks_MB, 1, axis=0), matchers.items(), strict=True):",
        tests=("engine/test_structured.py::test_masks_of_many_are_those_of_each",),
    ),
    Mutant(
        name="everybody-waits-for-a-slow-mask",
        file="engine/scheduler.py",
        old="            if not request.ready or not (adapter is None or adapter in batch.adapters):\n",
        new="            if not (adapter is None or adapter in batch.adapters):\n",
        tests=("engine/test_slow_grammars.py::test_others_go_on_while_a_mask_is_made",),
    ),
    Mutant(
        name="preempted-ones-do-not-wait-for-their-mask",
        file="engine/scheduler.py",
        old="            held_up = duplicates or not request.ready\n",
        new="            held_up = duplicates\n",
        tests=("engine/test_slow_grammars.py::test_one_that_was_preempted_meanwhile",),
    ),
    Mutant(
        name="slow-grammars-do-not-rest",
        file="engine/slow_masks.py",
        old="+ excess * (1 / SHARE - 1)",
        new="+ excess * 0",
        tests=("engine/test_slow_grammars.py::test_slow_grammars_rest_for_others",),
    ),
    Mutant(
        name="slow-grammars-rest-for-what-was-before",
        file="engine/slow_masks.py",
        old="                self._shared, self._rests_until = shared, 0.0\n",
        new="                self._shared = shared\n",
        tests=("engine/test_slow_grammars.py::test_slow_grammars_rest_for_others",),
    ),
    Mutant(
        name="who-waits-for-a-mask-takes-a-seat",
        file="engine/scheduler.py",
        old="return sum(request.is_ready is None or request.is_ready() for request in self.running)",
        new="return len(self.running)",
        tests=("engine/test_slow_grammars.py::test_who_waits_for_a_mask_takes_no_seat",),
    ),
    Mutant(
        name="who-waits-for-a-mask-keeps-room-for-an-adapter",
        file="engine/scheduler.py",
        old="            if request.ready and self._has_adapter(request, batch)",
        new="            if self._has_adapter(request, batch)",
        tests=("engine/test_scheduler.py::test_who_is_not_ready_keeps_no_room_for_its_adapter",),
    ),
    Mutant(
        name="masks-made-ahead-for-those-who-left",
        file="engine/engine.py",
        old="            request.matcher.drop()\n",
        new="            pass\n",
        tests=("engine/test_slow_grammars.py::test_it_may_end_while_its_mask_is_made",),
    ),
    Mutant(
        name="once-slow-always-slow",
        file="engine/grammar_matcher.py",
        old="self.slow, self._seconds = self._seconds + seconds > slow_masks.SLOW_SECONDS, 0.0",
        new="self.slow, self._seconds = self.slow or self._seconds + seconds > slow_masks.SLOW_SECONDS, 0.0",
        tests=("engine/test_slow_grammars.py::test_slow_is_what_takes_long",),
    ),
    Mutant(
        name="answers-in-sessions-kept-with-the-markers-of-harmony",
        file="server/chat.py",
        old="answer=(lambda text: answer_of(text, format)) if _wraps_answers(format) else None,",
        new="answer=None,",
        tests=("server/test_harmony.py::test_a_session",),
    ),
    Mutant(
        name="calls-that-turned-malformed-look-whole",
        file="server/tool_reader.py",
        old="        self.add(self.held())\n",
        new="        self.hold()\n",
        tests=("server/test_tool_streams.py::test_a_malformed_call_gets_all_of_it",),
    ),
    Mutant(
        name="calls-that-were-cut-are-a-reason-to-call",
        file="server/messages.py",
        old='all(json_type(call) == "object" for call in calls)',
        new="True",
        tests=("server/test_chat.py::test_a_call_that_is_not_whole_is_no_reason_to_call",),
    ),
    Mutant(
        name="held-grammars-have-no-limit",
        file="engine/structured.py",
        old="            if held >= MAX_HELD_MEMORY:\n",
        new="            if False:\n",
        tests=("engine/test_grammar_trial.py::test_what_is_held_has_a_limit",),
    ),
    Mutant(
        name="ctrl-c-ends-the-trial-of-grammars",
        file="engine/grammar_trial.py",
        old="            start_new_session=True,\n",
        new="",
        tests=("engine/test_grammar_trial.py::test_an_interrupt_is_for_the_parent",),
    ),
    Mutant(
        name="checked-grammars-forgotten-before-they-run",
        file="engine/structured.py",
        old="            self._held[id(wanted)] = matcher, self._sizes.get(wanted, 0)\n",
        new="            pass\n",
        tests=("engine/test_grammar_trial.py::test_what_was_checked_is_there_while_it_is_asked_for",),
    ),
    Mutant(
        name="everybody-may-wait-for-large-grammars",
        file="engine/grammar_trial.py",
        old="            while len(self._since) >= SEATS:\n",
        new="            while len(self._since) > SEATS:\n",
        tests=("engine/test_grammar_trial.py::test_few_wait_for_large_ones",),
    ),
    Mutant(
        name="beams-ranked-by-their-last-token",
        file="engine/beam.py",
        old="sums_M = (torch.tensor(totals, dtype=torch.float64)[:, None] + logprobs.double()).flatten()",
        new="sums_M = (0 * torch.tensor(totals, dtype=torch.float64)[:, None] + logprobs.double()).flatten()",
        tests=("engine/test_beam.py::test_equals_brute_force",),
    ),
    Mutant(
        name="length-penalty-ignored",
        file="engine/beam.py",
        old="return float(total / length**self._params.length_penalty)",
        new="return float(total / length)",
        tests=("engine/test_beam.py::test_equals_brute_force",),
    ),
    Mutant(
        name="swapped-state-of-the-whole-copy",
        file="engine/host_store.py",
        old="            if length < copy.length:\n",
        new="            if length > copy.length:\n",
        tests=("engine/test_host_memory.py::test_rewind_and_fork_of_a_session_that_was_moved",),
    ),
)

CHECKPOINTS = (
    Mutant(
        name="checkpoint-one-token-late",
        file="engine/checkpoints.py",
        old="found = {position - start for position in request.branches if start < position <= stop}",
        new="found = {position - start + 1 for position in request.branches if start < position < stop}",
        tests=("engine/test_checkpoints.py::test_where_prompts_part_a_state_is_kept",),
    ),
    Mutant(
        name="newest-checkpoint-given-up-first",
        file="engine/checkpoints.py",
        old="return saved, used\n",
        new="return saved, -used\n",
        tests=("engine/test_checkpoints.py::test_what_saves_least_goes_first_and_of_equals_the_oldest",),
    ),
    Mutant(
        name="written-states-given-up",
        file="engine/engine.py",
        old="        for seq in self.states.written():\n            ages.pop(seq, None)\n",
        new="",
        tests=("engine/test_checkpoints.py::test_sessions_that_were_written_into_keep_their_states",),
    ),
    Mutant(
        name="branch-not-noted",
        file="engine/scheduler.py",
        old="request.branches.add(request.known)",
        new="pass",
        tests=("engine/test_checkpoints.py::test_where_prompts_part_a_state_is_kept",),
    ),
    Mutant(
        name="replayed-tokens-not-counted",
        file="engine/scheduler.py",
        old="request.num_replayed = max(0, request.known - request.computed)",
        new="request.num_replayed = 0",
        tests=("engine/test_checkpoints.py::test_a_hit_in_the_middle_of_a_prompt",),
    ),
    Mutant(
        name="checkpoints-kept-when-a-step-needs-their-slots",
        file="engine/scheduler.py",
        old="return self._checkpoints is not None and self._checkpoints.relieve(seqs, counts)",
        new="return False",
        tests=("engine/test_checkpoints.py::test_checkpoints_go_before_cached_sequences",),
    ),
)

WRITTEN = (
    Mutant(
        name="state-of-before-the-write-stays-kept",
        file="engine/session_states.py",
        old="            self.apply(DropCheckpoint(seq, session.computed))\n",
        new="            pass\n",
        tests=("engine/test_checkpoints.py::test_a_written_state_is_what_one_comes_back_to",),
    ),
    Mutant(
        name="written-session-without-an-anchor",
        file="engine/session_states.py",
        old="        if session.modified:\n            self.anchor(session)\n",
        new="",
        tests=("engine/test_checkpoints.py::test_a_written_session_stays_usable_when_slots_fill",),
    ),
    Mutant(
        name="shorter-hit-instead-of-own-state",
        file="engine/session_states.py",
        old="if found is None or found[1] <= kept:",
        new="if found is None:",
        tests=("engine/test_checkpoints.py::test_going_back_uses_the_nearer_of_ones_own_states_and_the_cache",),
    ),
    Mutant(
        name="reading-states-takes-the-last-token-back",
        file="engine/session.py",
        old="            if kv.nearest_reachable(state.seq, last) != last:",
        new="            if kv.nearest_reachable(state.seq, last) == last:",
        tests=("engine/test_checkpoints.py::test_reading_undoes_no_write",),
    ),
)

MUTANTS = (*EXECUTOR, *SESSIONS, *ENGINE, *CHECKPOINTS, *WRITTEN)
