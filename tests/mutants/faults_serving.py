"""Faults of the runner, the executor and the engine."""

from __future__ import annotations

from tests.mutants.harness import Mutant

EXECUTOR = (
    Mutant(
        name="placeholders-not-replaced",
        file="runner/local.py",
        old="return x_TE.index_copy(0, rows, given if self._wide is None else self._wide.entering(given))",
        new="return x_TE",
        tests=("runner/test_local_runner.py::test_embeddings_stand_at_placeholders",),
    ),
    Mutant(
        name="embeddings-of-another-piece",
        file="branches/row_media.py",
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
        file="branches/extension.py",
        old="tree = None if self.parents is None else TokenTree(self.parents)",
        new="tree = None if self.parents is None else TokenTree(tuple(range(-1, len(self.parents) - 1)))",
        tests=("executor/test_trees.py::test_each_path_equals_that_path_alone",),
    ),
    Mutant(
        name="way-back-not-kept-under-windows",
        file="executor/transaction.py",
        old="return self._windows_evict or self.pool.state.shares_tail(part.row.seq)",
        new="return self.pool.state.shares_tail(part.row.seq)",
        tests=("executor/test_windows.py::test_a_failure_in_a_late_forward_is_undone",),
    ),
)

INTERRUPTS = (
    Mutant(
        name="signals-raise-inside-of-the-shield",
        file="base/interrupts.py",
        old="        if self._depth == self._exposed:\n            self._deliver()\n\n    def _install",
        new="        self._deliver()\n\n    def _install",
        tests=("base/test_interrupts.py",),
    ),
    Mutant(
        name="handlers-not-given-back",
        file="base/interrupts.py",
        old="                _signal.signal(number, handler)\n\n    def _deliver",
        new="                pass\n\n    def _deliver",
        tests=("base/test_interrupts.py",),
    ),
    Mutant(
        name="code-of-users-shielded",
        file="sampling/request_sampler.py",
        old="made = exposed(partial(processor, list(self.output), logits_V))",
        new="made = partial(processor, list(self.output), logits_V)()",
        tests=("engine/test_interrupts.py::test_a_logits_processor_is_interrupted_where_it_is",),
    ),
    Mutant(
        name="interrupts-wait-for-the-end-of-the-verb",
        file="engine/engine.py",
        old="                    on_step()\n                check()\n",
        new="                    on_step()\n",
        tests=("engine/test_interrupts.py::test_an_interrupt_takes_effect_after_the_step",),
    ),
    Mutant(
        name="submitted-and-interrupted",
        file="sessions/prompts.py",
        old="        with SHIELD:\n            submitted: ",
        new="        if True:\n            submitted: ",
        tests=("engine/test_interrupts.py::test_a_sample_of_all_lines",),
    ),
    Mutant(
        name="appended-and-interrupted",
        file="sessions/session.py",
        old="    @uninterrupted\n    @kept\n    def append(",
        new="    @kept\n    def append(",
        tests=("engine/test_interrupts.py::test_many_lines_between_the_parts_of_an_append",),
    ),
    Mutant(
        name="sessions-lost-to-the-garbage-collector",
        file="sessions/session.py",
        old="            live.engine.finalizers.watch(self, self._end)\n",
        new="",
        tests=("engine/test_interrupts.py::test_what_nobody_holds_any_more_is_ended_by_the_next_step",),
    ),
    Mutant(
        name="caches-lost-to-the-garbage-collector",
        file="executor/cache_rows.py",
        old="        pool.finalizers.watch(self, end)  # registered last, so that its callback runs first\n",
        new="",
        tests=("engine/test_interrupts.py::test_what_nobody_holds_any_more_is_ended_by_the_next_step",),
    ),
    Mutant(
        name="verbs-of-a-state-in-pieces",
        file="kv/contract.py",
        old="    return uninterrupted(verb(function))\n",
        new="    return verb(function)\n",
        tests=("engine/test_interrupts.py::test_verbs_of_a_state_by_hand",),
    ),
    Mutant(
        name="cancelled-streams-that-go-on",
        file="async_llm/stream.py",
        old="            await self.aclose()\n            raise",
        new="            self._abandon()\n            raise",
        tests=("engine/test_interrupts.py::test_cancelled_tasks",),
    ),
)

SESSIONS = (
    Mutant(
        name="matches-beyond-the-reach-of-a-window",
        file="branches/prefix_cache.py",
        old="(position := self._reach(seq, min(length, below.end))) > found",
        new="(position := min(length, below.end)) > found",
        tests=("test_gaps.py::test_under_windows_a_match_is_where_some_sequence_can_be_forked",),
    ),
    Mutant(
        name="covered-sequences-forgotten-under-windows",
        file="branches/prefix_cache.py",
        old="return [] if live else list(node.sequences.values())",
        new="return list(node.above())",
        tests=("test_gaps.py::test_under_windows_a_longer_sequence_does_not_replace_a_shorter_one",),
    ),
    Mutant(
        name="lost-position-counts-as-computed",
        file="branches/session_branches.py",
        old="            self.cache.truncate(seq, kept)\n        return kept",
        new="            self.cache.truncate(seq, kept)\n        return length",
        tests=("sessions/test_windowed_sessions.py::test_rewind_within_and_behind_the_window",),
    ),
    Mutant(
        name="fork-counts-what-a-window-lost",
        file="branches/owner.py",
        old="child.truncate_computed(held)",
        new="child.truncate_computed(min(parent.computed, held + 1))",
        tests=("branches/test_extension.py::test_a_fork_computes_what_its_state_does_not_hold",),
    ),
    Mutant(
        name="window-forgotten-when-computed-again",
        file="engine/scheduler.py",
        old="self._branches.add_seq(branch.window)",
        new="self._branches.add_seq(None if request.seat.num_preemptions else branch.window)",
        tests=("test_gaps.py::test_a_session_with_a_window_that_is_preempted_keeps_its_window",),
    ),
    Mutant(
        name="windowed-session-is-a-prefix-for-others",
        file="engine/session_requests.py",
        old="work.cacheable = not session.modified and session.window is None",
        new="work.cacheable = not session.modified",
        tests=("sessions/test_windowed_sessions.py::test_shares_no_prefix_with_sessions_without_a_window",),
    ),
)

ENGINE = (
    Mutant(
        name="the-oldest-is-preempted",
        file="engine/request_queues.py",
        old="return max(reversed(requests), key=lambda one: held[one.asked.owner])",
        new="return max(requests, key=lambda one: held[one.asked.owner])",
        tests=("engine/test_scheduler.py::test_the_youngest_is_preempted_and_comes_back_first",),
    ),
    Mutant(
        name="prompts-hold-up-decodes",
        file="engine/scheduler.py",
        old="self._fill([running for running in self.running if running.branch.remaining <= 1], batch)",
        new="self._fill(sorted(self.running, key=lambda running: running.branch.remaining <= 1), batch)",
        tests=("engine/test_scheduler.py::test_decodes_come_first_and_prompts_are_cut",),
    ),
    Mutant(
        name="prompt-logprobs-from-the-cache",
        file="engine/scheduler.py",
        old="return limit if request.output.fresh_from is None else min(limit, request.output.fresh_from)",
        new="return limit",
        tests=("engine/test_scheduler.py::test_fresh_tokens_are_run_whatever_is_cached",),
    ),
    Mutant(
        name="grammar-not-applied-to-the-first-token",
        file="engine/sampling_step.py",
        old="for row, request in enumerate(ready) if request.output.matcher is not None\n",
        new="for row, request in enumerate(ready) if request.output.matcher is not None and request.output.token_ids\n",
        tests=("grammars/test_structured.py::test_samples_are_in_the_language",),
    ),
    Mutant(
        name="grammar-not-advanced",
        file="engine/sampling_step.py",
        old="                matcher.accept(token)\n",
        new="                pass\n",
        tests=("grammars/test_structured.py::test_samples_are_in_the_language",),
    ),
    Mutant(
        name="masks-of-grammars-shifted-by-a-row",
        file="grammars/grammars.py",
        old="in zip(masks_MB, matchers.items(), strict=True):",
        new="in zip(np.roll(masks_MB, 1, axis=0), matchers.items(), strict=True):",
        tests=("grammars/test_structured.py::test_masks_of_many_are_those_of_each",),
    ),
    Mutant(
        name="slow-grammars-go-on-for-ever",
        file="grammars/matcher.py",
        old="        self._excess += max(0.0, seconds - USUAL_SECONDS)\n",
        new="",
        tests=("grammars/test_slow_grammars.py::test_a_slow_grammar_ends_its_request",),
    ),
    Mutant(
        name="who-is-not-ready-keeps-room-for-an-adapter",
        file="engine/scheduler.py",
        old="is not None and request.ready and batch.has_adapter(request)",
        new="is not None and batch.has_adapter(request)",
        tests=("engine/test_scheduler.py::test_who_is_not_ready_keeps_no_room_for_its_adapter",),
    ),
    Mutant(
        name="answers-in-sessions-kept-with-the-markers-of-harmony",
        file="server/openai/chat.py",
        old="answer=(lambda text: answer_of(text, format, ids, whole=whole)) if wrapped or whole else None,",
        new="answer=None,",
        tests=("server/test_harmony.py::test_a_session",),
    ),
    Mutant(
        name="calls-in-sessions-have-ids-of-their-own",
        file="server/openai/chat.py",
        old="        reply.ids = ids\n",
        new="",
        tests=("server/test_chat.py::test_a_session_goes_on_with_tools_and_a_switch_of_thinking",),
    ),
    Mutant(
        name="forks-forget-the-tools-of-a-chat",
        file="sessions/chat_turns.py",
        old="        copy.inputs = self.inputs\n",
        new="",
        tests=("sessions/test_session_chat.py::test_the_template_gets_tools_and_variables",),
    ),
    Mutant(
        name="calls-that-turned-malformed-look-whole",
        file="server/tools/reader.py",
        old="        self.add(self.held())\n",
        new="        self.hold()\n",
        tests=("server/test_tool_streams.py::test_a_malformed_call_gets_all_of_it",),
    ),
    Mutant(
        name="calls-that-were-cut-are-a-reason-to-call",
        file="server/tools/messages.py",
        old='all(json_type(call) == "object" for call in calls)',
        new="True",
        tests=("server/test_chat.py::test_a_call_that_is_not_whole_is_no_reason_to_call",),
    ),
    Mutant(
        name="held-grammars-have-no-limit",
        file="grammars/grammars.py",
        old="            if held >= MAX_HELD_MEMORY:\n",
        new="            if False:\n",
        tests=("grammars/test_grammar_trial.py::test_what_is_held_has_a_limit",),
    ),
    Mutant(
        name="ctrl-c-ends-the-trial-of-grammars",
        file="text/limited_process.py",
        old="            start_new_session=True,\n",
        new="",
        tests=("grammars/test_grammar_trial.py::test_an_interrupt_is_for_the_parent",),
    ),
    Mutant(
        name="checked-grammars-forgotten-before-they-run",
        file="grammars/grammars.py",
        old="            self._held[id(wanted)] = matcher, self._sizes.get(wanted, 0)\n",
        new="            pass\n",
        tests=("grammars/test_grammar_trial.py::test_what_was_checked_is_there_while_it_is_asked_for",),
    ),
    Mutant(
        name="everybody-may-wait-for-large-grammars",
        file="grammars/trial.py",
        old="            while len(self._since) >= SEATS:\n",
        new="            while len(self._since) > SEATS:\n",
        tests=("grammars/test_grammar_trial.py::test_few_wait_for_large_ones",),
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
        name="stored-rows-beyond-the-limit",
        file="branches/stored_match.py",
        old="length = min(limit, rows[-1].stop if rows else 0) if with_rows else limit",
        new="length = (rows[-1].stop if rows else 0) if with_rows else limit",
        tests=("branches/test_stored_state.py::test_evicted_prompts_come_back",),
    ),
)

CHECKPOINTS = (
    Mutant(
        name="checkpoint-one-token-late",
        file="engine/checkpoints.py",
        old="found = {position - start for position in request.seat.branch_points if start < position <= stop}",
        new="found = {position - start + 1 for position in request.seat.branch_points if start < position < stop}",
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
        file="engine/checkpoints.py",
        old="        for seq in branches.written():\n            ages.pop(seq, None)\n",
        new="",
        tests=("engine/test_checkpoints.py::test_sessions_that_were_written_into_keep_their_states",),
    ),
    Mutant(
        name="branch-not-noted",
        file="engine/scheduler.py",
        old="request.seat.branch_points.add(reuse.known)",
        new="pass",
        tests=("engine/test_checkpoints.py::test_where_prompts_part_a_state_is_kept",),
    ),
    Mutant(
        name="replayed-tokens-not-counted",
        file="engine/request.py",
        old="self.replayed = max(0, self.known - computed)",
        new="self.replayed = 0",
        tests=("engine/test_checkpoints.py::test_a_hit_in_the_middle_of_a_prompt",),
    ),
    Mutant(
        name="checkpoints-kept-when-a-step-needs-their-slots",
        file="engine/scheduler.py",
        old="return self._checkpoints is not None and self._checkpoints.free_state_slots(seqs, counts)",
        new="return False",
        tests=("engine/test_checkpoints.py::test_checkpoints_go_before_cached_sequences",),
    ),
)

WRITTEN = (
    Mutant(
        name="state-of-before-the-write-stays-kept",
        file="branches/session_branches.py",
        old="            self.apply(DropCheckpoint(seq, session.computed))\n",
        new="            pass\n",
        tests=("engine/test_checkpoints.py::test_a_written_state_is_what_one_comes_back_to",),
    ),
    Mutant(
        name="written-session-without-an-anchor",
        file="engine/session_requests.py",
        old="    if session.modified:\n        branches.anchor(session)\n",
        new="",
        tests=("engine/test_checkpoints.py::test_a_written_session_stays_usable_when_slots_fill",),
    ),
    Mutant(
        name="shorter-hit-instead-of-own-state",
        file="branches/session_branches.py",
        old="if found is None or found[1] <= kept:",
        new="if found is None:",
        tests=("engine/test_checkpoints.py::test_going_back_uses_the_nearer_of_ones_own_states_and_the_cache",),
    ),
    Mutant(
        name="reading-states-takes-the-last-token-back",
        file="sessions/state.py",
        old="        if kv.nearest_reachable(branch.seq, last) != last:",
        new="        if kv.nearest_reachable(branch.seq, last) == last:",
        tests=("engine/test_checkpoints.py::test_reading_undoes_no_write",),
    ),
)

MUTANTS = (*INTERRUPTS, *EXECUTOR, *SESSIONS, *ENGINE, *CHECKPOINTS, *WRITTEN)
