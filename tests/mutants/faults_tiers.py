"""Faults in the tiers of a store and in what composes them."""

from __future__ import annotations

from tests.mutants.harness import Mutant

MUTANTS = (
    Mutant(
        name="uses-of-what-was-given-up-forgotten",
        file="store/memory.py",
        old="above.use = max(above.use, one.use)",
        new="pass",
        tests=("store/test_tiers.py::test_operations[memory]",),
    ),
    Mutant(
        name="uses-of-deleted-rows-forgotten",
        file="store/file_index.py",
        old=", use = max(use, OLD.use) WHERE",
        new=" WHERE",
        tests=("store/test_tiers.py::test_operations[files]",),
    ),
    Mutant(
        name="objects-through-links",
        file="store/files.py",
        old="os.O_RDONLY | os.O_NOFOLLOW |",
        new="os.O_RDONLY |",
        tests=("store/test_files.py::test_a_file_of_another_size_is_a_miss",),
    ),
    Mutant(
        name="records-of-killed-writers-removed",
        file="store/files.py",
        old="if found is not None and _is_record(name):",
        new="if found is not None and False:",
        tests=("store/test_files.py::test_of_a_record_the_file_is_right",),
    ),
    Mutant(
        name="names-not-checked",
        file="store/keys.py",
        old="return ObjectKey.parse(key.name).name",
        new="return key.name",
        tests=("store/test_files.py::test_names_stay_where_they_belong",),
    ),
    Mutant(
        name="objects-of-redis-under-which-others-stand-given-up",
        file="store/redis.py",
        old="for _, one in ipairs(above(name)) do call('ZREM', 'queue', one) end",
        new="",
        tests=("store/test_tiers.py::test_operations_on_redis",),
    ),
    Mutant(
        name="endless-queue",
        file="store/stack.py",
        old="self._queued + size > self._queue_bytes and",
        new="False and",
        tests=("store/test_stack.py::test_the_queue_is_bounded",),
    ),
    Mutant(
        name="old-records-in-memory",
        file="store/stack.py",
        old="tier.kind in REMOTE and key.kind is not ObjectKind.RECORD",
        new="tier.kind in REMOTE",
        tests=("store/test_stack.py::test_what_comes_from_afar_stays_near",),
    ),
    Mutant(
        name="reads-of-before-a-change-shared",
        file="store/stack.py",
        old="                self._flights.pop(key, None)  #",
        new="                pass  #",
        tests=("store/test_stack.py::test_a_read_that_began_before_a_change_is_none_after_it",),
    ),
    Mutant(
        name="lost-objects-still-known",
        file="store/tier_guard.py",
        old="self._known[parent] = set(keys)",
        new="self._known.setdefault(parent, set()).update(keys)",
        tests=("store/test_stack.py::test_known_is_what_all_tiers_have",),
    ),
    Mutant(
        name="late-failures-count-again",
        file="store/tier_guard.py",
        old="        if ticket == self._turns:\n            if not self._rest and reason",
        new="        if True:\n            if not self._rest and reason",
        tests=("store/test_stack.py::test_calls_of_before_a_change_decide_nothing",),
    ),
    Mutant(
        name="passwords-in-messages",
        file="store/urls.py",
        old='if "@" in url:',
        new="if False:",
        tests=("store/test_urls.py::test_what_is_no_url",),
    ),
)
