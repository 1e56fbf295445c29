"""Faults in hints: pins, demotion, priorities, and how they come over HTTP."""

from tests.mutants.harness import Mutant

MUTANTS = (
    Mutant(
        name="pins-for-ever",
        file="engine/prefix_pins.py",
        old="if held.until <= now]",
        new="if held.until < 0 * now]",
        tests=("engine/test_hints.py::test_a_pin_stays_for_its_time",),
    ),
    Mutant(
        name="pins-beyond-the-share",
        file="engine/prefix_pins.py",
        old="            self._pins.check(branch, length, account)\n",
        new="            pass\n",
        tests=("engine/test_hints.py::test_pins_keep_to_their_share",),
    ),
    Mutant(
        name="a-pin-shortens-another",
        file="engine/prefix_pins.py",
        old="held.until = max(held.until, until)",
        new="held.until = until",
        tests=("engine/test_hints.py::test_a_pin_of_tokens_that_are_cached_already",),
    ),
    Mutant(
        name="pins-of-all-accounts-are-one",
        file="engine/prefix_pins.py",
        old="name, until = (account, work.key, ids.tobytes())",
        new="name, until = (None, work.key, ids.tobytes())",
        tests=("engine/test_hints.py::test_pins_of_one_account_do_not_prolong_those_of_another",),
    ),
    Mutant(
        name="no-step-ends-at-a-pin",
        file="engine/request_book.py",
        old="            request.work.stops = request.hints.stops\n",
        new="            pass\n",
        tests=("engine/test_hints.py::test_a_pin_of_a_hybrid",),
    ),
    Mutant(
        name="demoted-to-the-ground",
        file="engine/session_branches.py",
        old="fork = self.fork_of(seq, kept) if kept else None",
        new="fork = None",
        tests=("engine/test_hints.py::test_what_is_demoted_goes",),
    ),
    Mutant(
        name="broken-state-stays-pinned",
        file="engine/request_book.py",
        old="            request.hints.failed(self.prefix_pins.drop)\n",
        new="            pass\n",
        tests=("engine/test_hints.py::test_what_a_failed_request_pinned_is_not_handed_out",),
    ),
    Mutant(
        name="long-prompts-hold-up-urgent-ones",
        file="engine/scheduler.py",
        old="running.remaining > 1 and running.priority > most]",
        new="running.remaining > 1 and running.priority > 10 * most + 10]",
        tests=("engine/test_hints.py::test_an_urgent_prompt_passes_a_long_one",),
    ),
    Mutant(
        name="a-key-overtakes-others",
        file="server/hint_fields.py",
        old="if body.priority < 0 and len(set(context.settings.api_key)) > 1:",
        new="if False:",
        tests=("server/test_hint_fields.py::test_a_key_does_not_overtake_others",),
    ),
    Mutant(
        name="templates-see-marks",
        file="server/cache_marks.py",
        old='for name, item in value.items() if name != "cache_control"}',
        new="for name, item in value.items()}",
        tests=("server/test_hint_fields.py::test_marks_on_tools",),
    ),
    Mutant(
        name="marks-are-not-where-they-stand",
        file="server/cache_marks.py",
        old="before = np.array(tokenizer.encode(text[:place]",
        new="before = np.array(tokenizer.encode(text[: place // 2]",
        tests=("server/test_hint_fields.py::test_marks_pin_what_stands_before_them",),
    ),
)
