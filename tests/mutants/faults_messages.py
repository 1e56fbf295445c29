"""Faults of ``/v1/messages``: blocks, marks, events, errors and keys."""

from __future__ import annotations

from tests.mutants.harness import Mutant

MESSAGES = "server/test_anthropic_messages.py"

MUTANTS = (
    Mutant(
        name="cut-calls-that-are-made",
        file="server/anthropic/events.py",
        old='elif calls and all(json_type(call) == "object" for call in calls):',
        new="elif calls:",
        tests=(f"{MESSAGES}::test_calls_that_are_cut_are_not_to_be_made",),
    ),
    Mutant(
        name="cached-tokens-counted-twice",
        file="server/anthropic/events.py",
        old='"input_tokens": counts["prompt"] - counts["cached"] - created,',
        new='"input_tokens": counts["prompt"] - created,',
        tests=(f"{MESSAGES}::test_an_answer_is_that_of_the_chat",),
    ),
    Mutant(
        name="marks-of-results-lost",
        file="server/anthropic/blocks.py",
        old='            message["cache_control"] = block.cache_control\n',
        new="            pass\n",
        tests=(f"{MESSAGES}::test_marks_pin_what_they_mark",),
    ),
    Mutant(
        name="places-of-the-chat-told",
        file="server/anthropic/events.py",
        old='"id": self._turns.place(hint["id"])',
        new='"id": hint["id"]',
        tests=(f"{MESSAGES}::test_marks_pin_what_they_mark",),
    ),
    Mutant(
        name="results-of-no-call",
        file="server/anthropic/blocks.py",
        old="if block.tool_use_id not in self._calls:",
        new="if False:",
        tests=(f"{MESSAGES}::test_what_is_not_taken_is_refused_by_name",),
    ),
    Mutant(
        name="errors-in-openais-shape",
        file="server/http/errors.py",
        old="        body = anthropic_body(error)",
        new="        pass",
        tests=(f"{MESSAGES}::test_errors_on_the_way_have_anthropics_shape",),
    ),
    Mutant(
        name="any-api-key-is-taken",
        file="server/http/gate.py",
        old="if offered and any(known):",
        new="if offered:",
        tests=(f"{MESSAGES}::test_errors_on_the_way_have_anthropics_shape",),
    ),
)
