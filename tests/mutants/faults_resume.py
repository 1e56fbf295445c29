"""Faults of the journal of sessions, and of what writes it."""

from __future__ import annotations

from tests.mutants.harness import Mutant

MUTANTS = (
    Mutant(
        name="a-damaged-record-is-taken",
        file="store/journal.py",
        old="if _digest(name, fields, tokens) != digest:",
        new="if False:",
        tests=("store/test_session_journal.py::test_one_bad_record_costs_one_session",),
    ),
    Mutant(
        name="state-files-stay-for-ever",
        file="store/journal.py",
        old="for name in named.difference(states.values(), [None]):",
        new="for name in ():",
        tests=("store/test_session_journal.py::test_state_files",),
    ),
    Mutant(
        name="a-clock-that-was-set-counts",
        file="store/journal.py",
        old="same = self.boot and self.boot == later.boot",
        new="same = False",
        tests=("store/test_session_journal.py::test_what_is_left_of_a_life",),
    ),
    Mutant(
        name="half-a-transaction-stays",
        file="store/journal.py",
        old='db.execute("BEGIN IMMEDIATE")',
        new='db.execute("SELECT 1")',
        tests=("store/test_session_journal.py",),
    ),
    Mutant(
        name="one-change-that-fails-takes-others-along",
        file="store/journal_writer.py",
        old="if not self._write(waiting) and len(waiting) > 1:",
        new="if not self._write(waiting) and [order[1].set_exception(NotDurable()) for order in waiting] == []:",
        tests=("store/test_session_journal.py::test_a_full_disk",),
    ),
    Mutant(
        name="the-last-event-does-not-wait",
        file="server/sessions/streams.py",
        old="                with took_effect():\n                    await self._context.sessions.keep(self._held)\n            return delta",
        new="            return delta",
        tests=("server/test_resume.py::test_a_disk_that_fills_during_a_stream",),
    ),
    Mutant(
        name="the-reply-does-not-wait",
        file="server/sessions/held.py",
        old="            yield held\n            with took_effect():\n                await self.keep(held)",
        new="            yield held",
        tests=("server/test_resume.py::test_a_full_disk",),
    ),
    Mutant(
        name="calls-begin-that-cannot-be-kept",
        file="server/sessions/held.py",
        old="if self.keeper.failing or held.durable is None:",
        new="if False:",
        tests=("server/test_resume.py::test_a_full_disk",),
    ),
    Mutant(
        name="deleted-sessions-come-back",
        file="server/sessions/held.py",
        old="                await self.keeper.forget(session_id)\n            finally:",
        new="                pass\n            finally:",
        tests=("server/test_resume.py::test_a_session_is_what_it_was",),
    ),
    Mutant(
        name="deleted-while-its-state-is-written",
        file="server/sessions/keeper.py",
        old="if is_gone():",
        new="if False:",
        tests=("server/test_resume.py::test_what_is_deleted_while_it_runs",),
    ),
    Mutant(
        name="a-closed-session-is-behind",
        file="sessions/session.py",
        old="if self._is_behind and not self._engine.closed:",
        new="if False:",
        tests=("sessions/test_kept_sessions.py::test_what_tokens_do_not_give_is_in_a_state_file",),
    ),
    Mutant(
        name="owners-in-the-journal",
        file="server/sessions/keeper.py",
        old="owner=hidden(owner), lifetime=lifetime",
        new="owner=owner, lifetime=lifetime",
        tests=("server/test_resume.py::test_each_key_has_its_own",),
    ),
    Mutant(
        name="resumed-without-its-salt",
        file="sessions/durable.py",
        old="if record.private else cache_key(record.salt)",
        new="if record.private else cache_key(None)",
        tests=("sessions/test_kept_sessions.py::test_windows_salts_and_pins",),
    ),
    Mutant(
        name="another-model-goes-on",
        file="sessions/durable.py",
        old="if dict(record.model) != model:",
        new="if False:",
        tests=("server/test_resume.py::test_another_model",),
    ),
    Mutant(
        name="another-dtype-is-computed-again",
        file="sessions/saving.py",
        old="return branch.modified or not branch.origin.exact or",
        new="return branch.modified or",
        tests=("sessions/test_kept_sessions.py::test_another_dtype_is_not_computed_again",),
    ),
    Mutant(
        name="loaded-chats-begin-anew",
        file="sessions/sources.py",
        old="                session._live.turns = turns\n",
        new="",
        tests=("sessions/test_saved_chats.py::test_a_chat_goes_on_as_if_it_had_not_been_saved",),
    ),
)
