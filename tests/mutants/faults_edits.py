"""Faults of state that is exact up to a token, and of edits."""

from __future__ import annotations

from tests.mutants.harness import Mutant

MUTANTS = (
    Mutant(
        name="prompts-begin-with-inexact-state",
        file="branches/session_branches.py",
        old="seq, exact = branch.seq, branch.origin.exact_part(branch.computed)",
        new="seq, exact = branch.seq, branch.computed",
        tests=("branches/test_inexact.py::test_prompts_begin_with_the_exact_part",),
    ),
    Mutant(
        name="what-runs-again-stays-inexact",
        file="branches/branch.py",
        old="self.computed, self.origin = length, self.origin.cut(length)",
        new="self.computed = length",
        tests=("branches/test_inexact.py::test_what_was_dropped_is_computed_again_and_exact",),
    ),
    Mutant(
        name="requests-forget-that-a-session-is-inexact",
        file="engine/session_requests.py",
        old="work.seq, work.computed, work.origin = session.seq, session.computed, session.origin",
        new="work.seq, work.computed = session.seq, session.computed",
        tests=("branches/test_inexact.py::test_forks_and_rewinds", "branches/test_inexact.py::test_at_random"),
    ),
    Mutant(
        name="samples-of-an-inexact-prompt-are-exact",
        file="engine/steps.py",
        old="        branch.origin = parent.origin\n",
        new="",
        tests=("branches/test_inexact.py::test_a_request_that_is_inexact_from_a_token_on",),
    ),
    Mutant(
        name="pinned-prefixes-are-inexact",
        file="engine/pins.py",
        old="prompt.origin.exact_part(min(length, prompt.computed))",
        new="min(length, prompt.computed)",
        tests=("branches/test_inexact.py::test_pins_hold_the_exact_part",),
    ),
    Mutant(
        name="files-do-not-say-how-far-they-are-exact",
        file="branches/saved_rows.py",
        old="return None if exact else tokens or 0",
        new="return None if exact else 0",
        tests=("branches/test_inexact.py::test_files_say_how_far",),
    ),
    Mutant(
        name="edits-run-all-under-one-adapter",
        file="sessions/edits.py",
        old="runs = branch.runs.spliced(place.start, place.stop, added.size, branch.adapter)",
        new="runs = branch.runs.then(place.start, branch.adapter)",
        tests=("adapters/test_adapters.py::test_conversations",),
    ),
    Mutant(
        name="an-edited-session-is-free-meanwhile",
        file="sessions/edits.py",
        old="        live.branch.successor = branch\n",
        new="",
        tests=("sessions/test_edits.py::test_failed_and_cancelled_edits",),
    ),
    Mutant(
        name="written-state-behind-an-edit-runs-again",
        file="sessions/edits.py",
        old="if place.stop < ids.size and (",
        new="if False and (",
        tests=("sessions/test_edits.py::test_what_cannot_run_again",),
    ),
    Mutant(
        name="edits-lose-embeddings",
        file="sessions/edits.py",
        old=", branch.tokens.media)",
        new=")",
        tests=("engine/test_media.py::test_sessions_at_random",),
    ),
    Mutant(
        name="the-next-turn-undoes-an-edit",
        file="sessions/edits.py",
        old="            live.turns = turns\n",
        new="",
        tests=("sessions/test_edits.py::test_a_message_of_a_chat",),
    ),
    Mutant(
        name="edits-take-any-message-that-says-so",
        file="sessions/chat_turns.py",
        old="if len(places) != texts.count(text):",
        new="if False:",
        tests=("sessions/test_edits.py::test_messages_that_say_the_same",),
    ),
    Mutant(
        name="one-of-several-texts-is-edited",
        file="text/text_spans.py",
        old="if whole.find(wanted, at + 1) >= 0:",
        new="if False:",
        tests=("sessions/test_edits.py::test_a_text_is_taken_out",),
    ),
    Mutant(
        name="an-edit-of-a-pinned-session-is-not-pinned",
        file="sessions/edits.py",
        old="    fork.pinned = branch.pinned\n",
        new="",
        tests=("sessions/test_edits.py::test_a_pinned_session_is_pinned_while_it_is_edited",),
    ),
    Mutant(
        name="logits-of-before-a-write-are-given",
        file="branches/session_branches.py",
        old="session.origin = replace(session.origin, modified=True)\n        session.logits = None\n",
        new="session.origin = replace(session.origin, modified=True)\n",
        tests=("sessions/test_sessions.py::test_logits_after_a_write_are_new",),
    ),
)
