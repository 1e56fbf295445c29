"""Faults of the limits that hold for strangers: their texts, files and requests."""

from __future__ import annotations

from tests.mutants.harness import Mutant

MUTANTS = (
    Mutant(
        name="texts-that-cannot-fit-are-tokenised",
        file="engine/request_checks.py",
        old="        if size > limit.bytes:\n",
        new="        if False:\n",
        tests=("text/test_long_texts.py::test_a_text_that_cannot_fit_is_not_tokenised",),
    ),
    Mutant(
        name="long-texts-beside-each-other",
        file="text/long_texts.py",
        old="            while _turns:\n",
        new="            while False:\n",
        tests=("text/test_long_texts.py::test_one_long_text_at_a_time",),
    ),
    Mutant(
        name="templates-without-a-clock",
        file="text/template_programs.py",
        old="    if time.monotonic() > end:\n",
        new="    if False:\n",
        tests=("text/test_long_texts.py::test_templates_have_a_time",),
    ),
    Mutant(
        name="a-lane-that-loses-its-thread",
        file="server/http/text_threads.py",
        old="                self._places.release()\n",
        new="                pass\n",
        tests=("server/test_texts.py::test_who_has_gone_is_not_worked_for",),
    ),
    Mutant(
        name="headers-parsed-before-they-are-counted",
        file="statefile/header.py",
        old="        if found > most:\n",
        new="        if False:\n",
        tests=("sessions/test_state_metadata.py::test_headers_of_containers_are_refused_before_they_are_parsed",),
    ),
    Mutant(
        name="metadata-of-any-shape",
        file="sessions/saving.py",
        old="        check_metadata(file.metadata)\n",
        new="        pass\n",
        tests=("sessions/test_state_metadata.py::test_every_field_of_a_session",),
    ),
    Mutant(
        name="chats-of-any-size",
        file="sessions/saving.py",
        old="    if len(data) > MOST_CHAT:\n",
        new="    if False:\n",
        tests=("sessions/test_saved_chats.py::test_a_hostile_chat_is_refused_before_it_is_parsed",),
    ),
    Mutant(
        name="states-shorter-than-their-tokens",
        file="sessions/saving.py",
        old="not in (saved.total, max(0, saved.total - 1)):",
        new="> saved.total:",
        tests=("sessions/test_state_metadata.py::test_a_state_shorter_than_its_tokens_is_refused",),
    ),
    Mutant(
        name="two-lengths-of-one-body",
        file="server/http/gate.py",
        old="                check_framing(scope)\n",
        new="",
        tests=("server/test_framing.py::test_two_lengths_are_none",),
    ),
    Mutant(
        name="bare-line-feeds",
        file="server/http/serving.py",
        old="        if self.their_state is h11.IDLE:\n",
        new="        if False:\n",
        tests=("server/test_framing.py::test_lines_end_with_both_characters",),
    ),
    Mutant(
        name="credit-for-quick-senders",
        file="server/http/gate.py",
        old="/ SLOWEST, loop.time() + PATIENCE, end)",
        new="/ SLOWEST, end)",
        tests=("server/test_framing.py::test_who_was_quick_may_not_be_silent_for_long",),
    ),
    Mutant(
        name="bodies-that-nobody-counts",
        file="server/http/gate.py",
        old="        self._portions.take(self._owner, count)\n",
        new="        pass\n",
        tests=("server/test_framing.py::test_bytes_are_counted_until_they_are_done_with",),
    ),
    Mutant(
        name="uploads-counted-at-their-end",
        file="server/sessions/files.py",
        old="            place.claim(arrived)\n",
        new="            pass\n",
        tests=("server/test_framing.py::test_uploads_count_while_they_come",),
    ),
)
