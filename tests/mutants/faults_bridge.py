"""Faults between sessions and KV caches, and of embeddings in histories."""

from __future__ import annotations

from tests.mutants.harness import Mutant

MUTANTS = (
    Mutant(
        name="prompts-begin-with-salted-rows",
        file="branches/prefix_sharing.py",
        old=" not row.origin.is_shareable or",
        new="",
        tests=("engine/test_bridge.py::test_salted_tokens_and_windows_are_no_prefix_for_prompts",),
    ),
    Mutant(
        name="prompts-begin-with-windowed-rows",
        file="branches/prefix_sharing.py",
        old=" or row.window != pool.row_window",
        new="",
        tests=("engine/test_bridge.py::test_salted_tokens_and_windows_are_no_prefix_for_prompts",),
    ),
    Mutant(
        name="written-states-run-again",
        file="branches/replay.py",
        old=" and not row.origin.modified:",
        new=":",
        tests=("engine/test_bridge.py::test_a_written_recurrent_state_is_not_run_again_by_the_executor",),
    ),
    Mutant(
        name="rows-give-up-written-states",
        file="branches/cache_rows.py",
        old="            known = 0 if row.origin.modified else known\n",
        new="",
        tests=("engine/test_bridge.py::test_a_written_recurrent_state_is_not_run_again_by_the_executor",),
    ),
    Mutant(
        name="cleared-rows-keep-the-window-of-a-session",
        file="executor/cache.py",
        old="            if row.window != self.pool.row_window:",
        new="            if False:",
        tests=("engine/test_bridge.py::test_salted_tokens_and_windows_are_no_prefix_for_prompts",),
    ),
    Mutant(
        name="session-files-without-their-last-token",
        file="branches/serialized.py",
        old="    if any(row.owed.size for row in saved):",
        new="    if False:",
        tests=("engine/test_bridge.py::test_files_of_both_are_read_by_both",),
    ),
    Mutant(
        name="sessions-of-caches-feed-the-prefix-cache",
        file="engine/row_sessions.py",
        old='("cache", engine.runner.new_seq())',
        new='("", None)',
        tests=("engine/test_bridge.py::test_a_session_of_a_cache_is_no_prefix_for_others",),
    ),
    Mutant(
        name="written-rows-become-plain-sessions",
        file="engine/row_sessions.py",
        old="Origin(exact=origin.exact, modified=fixed), fixed",
        new="Origin(exact=origin.exact, modified=False), False",
        tests=("engine/test_bridge.py::test_a_state_that_was_written_into",),
    ),
    Mutant(
        name="sessions-of-caches-forget-adapters",
        file="engine/row_sessions.py",
        old="    state.runs = runs\n",
        new="",
        tests=("engine/test_bridge.py::test_adapters_of_each_token",),
    ),
    Mutant(
        name="rows-at-other-positions-become-sessions",
        file="engine/row_sessions.py",
        old="if source.positions is not None and not are_indices",
        new="if False and not are_indices",
        tests=("engine/test_bridge.py::test_rows_at_positions_of_their_own_are_no_sessions",),
    ),
    Mutant(
        name="embeddings-known-by-placeholders",
        file="engine/prompts.py",
        old="    recorded = recorded_ids(ids, media)\n",
        new="    recorded = np.where(ids < 0, ids - 4, ids)\n",
        tests=("engine/test_media.py::test_the_prefix_cache_goes_by_the_data",),
    ),
    Mutant(
        name="sessions-lose-embeddings",
        file="engine/session_states.py",
        old="tokens = work.tokens.fork(count)",
        new="tokens = type(work.tokens)(work.tokens.ids[:count])",
        tests=("engine/test_media.py::test_sessions_at_random",),
    ),
    Mutant(
        name="forks-lose-embeddings",
        file="engine/session.py",
        old="tokens=parent.tokens.fork(length)",
        new="tokens=type(parent.tokens)(parent.tokens.ids[:length])",
        tests=("engine/test_media.py::test_sessions_at_random",),
    ),
    Mutant(
        name="gone-embeddings-not-missed",
        file="engine/session_states.py",
        old="    known.require(tokens[max(0, min(session.computed, tokens.size - 1)) :])\n",
        new="",
        tests=("engine/test_media.py::test_saved_and_as_a_cache",),
    ),
    Mutant(
        name="loaded-embeddings-computed-again",
        file="engine/saved_sessions.py",
        old=" or bool((tokens < 0).any())",
        new="",
        tests=("engine/test_media.py::test_saved_and_as_a_cache",),
    ),
    Mutant(
        name="penalties-count-embeddings",
        file="engine/request_book.py",
        old="spoken = tokens.ids[tokens.ids >= 0]",
        new="spoken = tokens.ids",
        tests=("engine/test_media.py::test_samples_penalties_and_what_a_caller_does_afterwards",),
    ),
    Mutant(
        name="images-at-the-end-not-saved",
        file="engine/state_access.py",
        old="        if ends_in_media:",
        new="        if False:",
        tests=("engine/test_media.py::test_a_session_that_ends_in_an_image_is_saved",),
    ),
)
