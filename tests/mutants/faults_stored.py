"""Faults of state in stores: what is kept, under which name, and what is believed."""

from __future__ import annotations

from tests.mutants.harness import Mutant

STORED = "engine/test_stored_state.py"
FILES = "engine/test_stored_files.py"

MUTANTS = (
    Mutant(
        name="keys-without-their-salt",
        file="store/keys.py",
        old='{**made_of, "salt": salt}',
        new='{**made_of, "salt": None}',
        tests=(f"{STORED}::test_salts_find_only_their_own",),
    ),
    Mutant(
        name="keys-without-the-model",
        file="store/keys.py",
        old='"model": dict(model), ',
        new='"model": {}, ',
        tests=(f"{FILES}::test_what_differs_is_not_found",),
    ),
    Mutant(
        name="objects-of-another-name",
        file="store/objects.py",
        old='if name != "sequence"} != contents.metadata(key):',
        new='if name != "sequence"} == {}:',
        tests=(f"{STORED}::test_damaged_objects_are_misses",),
    ),
    Mutant(
        name="objects-whose-checksums-are-not-looked-at",
        file="store/objects.py",
        old="            file.verify(full)\n",
        new="            pass\n",
        tests=(f"{STORED}::test_damaged_objects_are_misses",),
    ),
    Mutant(
        name="sessions-with-different-windows-share",
        file="branches/stored_state.py",
        old="branch.salt if branch.window is None else (branch.salt, branch.window.size, branch.window.sink)",
        new="branch.salt",
        tests=(f"{STORED}::test_a_session_with_a_window_comes_back",),
    ),
    Mutant(
        name="the-pages-of-the-pool-are-not-shared",
        file="branches/stored_state.py",
        old="prepare_import(seq, metadata, parent=branch.seq if shared else None, shared=shared)",
        new="prepare_import(seq, metadata)",
        tests=(f"{STORED}::test_rows_are_loaded_behind_shared_pages",),
    ),
)
