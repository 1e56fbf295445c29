"""Faults of commits and branches."""

from __future__ import annotations

from tests.mutants.harness import Mutant

ENGINE = "sessions/test_history.py::"
MUTANTS = (
    Mutant(
        name="branches-without-a-way-to-them",
        file="store/history.py",
        old="        while head is not None and at != head:",
        new="        while False:",
        tests=(ENGINE + "test_log_and_branches",),
    ),
    Mutant(
        name="commits-that-are-not-looked-at",
        file="store/commits.py",
        old="        if digest_of(document) != name:",
        new="        if False:",
        tests=(ENGINE + "test_forged_records",),
    ),
    Mutant(
        name="pieces-of-any-place",
        file="store/commits.py",
        old="    return {digest_of([number, piece]): piece for number, piece in enumerate(pieces)}",
        new="    return {digest_of([0, piece]): piece for number, piece in enumerate(pieces)}",
        tests=(ENGINE + "test_chats", ENGINE + "test_a_branch_stores_its_own_objects_only"),
    ),
    Mutant(
        name="one-space-for-all-owners",
        file="store/commits.py",
        old='if owner else "")',
        new='if not owner else "")',
        tests=(ENGINE + "test_owners_have_names_of_their_own",),
    ),
    Mutant(
        name="collections-that-take-what-others-need",
        file="store/collection.py",
        old="for key, nbytes in one.gone.items() if key not in kept}",
        new="for key, nbytes in one.gone.items()}",
        tests=(ENGINE + "test_random_histories_and_collections",),
    ),
    Mutant(
        name="collections-of-young-commits",
        file="store/collection.py",
        old="now - one.time < spared]",
        new="now < one.time]",
        tests=(ENGINE + "test_young_commits_and_the_state_of_others_stay",),
    ),
    Mutant(
        name="collections-under-which-others-stand",
        file="store/collection.py",
        old="removed = {key: nbytes for key, nbytes in gone.items() if key not in below}",
        new="removed = gone",
        tests=(ENGINE + "test_young_commits_and_the_state_of_others_stay",),
    ),
    Mutant(
        name="damage-is-pushed",
        file="store/transfer.py",
        old="        if blob is None or not _is_whole(key, blob, file=key in self._whole):",
        new="        if blob is None:",
        tests=(ENGINE + "test_what_is_damaged_is_not_passed_on",),
    ),
    Mutant(
        name="branches-before-their-state",
        file="sessions/commits.py",
        old="        if not there[key]:",
        new="        if False:",
        tests=(ENGINE + "test_a_checkout_goes_on_as_if_nothing_had_happened",),
    ),
    Mutant(
        name="whole-states-that-are-not-looked-at",
        file="sessions/history.py",
        old="    if hashlib.blake2b(blob, digest_size=KEY_BYTES).digest() != ",
        new="    if b'' == ",
        tests=(ENGINE + "test_what_tokens_do_not_give_is_kept_whole",),
    ),
    Mutant(
        name="collections-of-what-damage-hides",
        file="store/collection.py",
        old="        if hides:\n            return\n",
        new="",
        tests=(ENGINE + "test_a_damaged_record_keeps_its_owners_commits_and_no_others",),
    ),
    Mutant(
        name="objects-of-a-commit-are-not-pinned",
        file="store/history.py",
        old="await self.pin([*named, *objects])",
        new="await self.pin(named)",
        tests=("sessions/test_history.py::test_what_is_committed_outlives_evictions",),
    ),
    Mutant(
        name="the-space-of-a-branch-is-not-pinned",
        file="store/history.py",
        old="await self.pin([space, key])",
        new="await self.pin([key])",
        tests=("sessions/test_history.py::test_what_is_committed_outlives_evictions",),
    ),
)
