"""Faults of state in stores: what is kept, under which name, and what is believed."""

from __future__ import annotations

from tests.mutants.harness import Mutant

STORED = "branches/test_stored_state.py"
ROWS = "branches/test_object_rows.py"
FILES = "branches/test_stored_files.py"
AHEAD = "branches/test_saving_ahead.py"

MUTANTS = (
    Mutant(
        name="windowed-sessions-are-not-written",
        file="engine/session_requests.py",
        old="if is_end and (work.cacheable or session.window is not None):",
        new="if is_end and work.cacheable:",
        tests=("branches/test_stored_files.py::test_a_session_with_a_window_is_written_while_it_goes_on",),
    ),
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
        old="        file.verify(*(tensor_name(layer, name) for name in plan))\n",
        new="        pass\n",
        tests=(f"{ROWS}::test_a_flipped_bit_is_never_seen",),
    ),
    Mutant(
        name="damage-that-the-call-finds-is-passed-over",
        file="branches/object_rows.py",
        old="< len(self.rows.pieces):",
        new="< 0:",
        tests=(f"{ROWS}::test_a_call_that_sees_damage_alone_is_believed", f"{ROWS}::test_a_flipped_bit_is_never_seen"),
    ),
    Mutant(
        name="objects-of-another-layout-are-handed-to-the-call",
        file="branches/object_rows.py",
        old="(spec.shape, spec.dtype) != wanted",
        new="False",
        tests=(f"{ROWS}::test_what_does_not_fit_is_said",),
    ),
    Mutant(
        name="rows-of-an-object-from-its-first-on",
        file="branches/object_rows.py",
        old="np.array([(len(part), part.start) for part in self.parts]).T",
        new="np.array([(len(part), 0) for part in self.parts]).T",
        tests=(f"{ROWS}::test_rows_come_behind_shared_ones",),
    ),
    Mutant(
        name="sessions-with-different-windows-share",
        file="branches/state_keys.py",
        old="branch.salt if branch.window is None else (branch.salt, branch.window.size, branch.window.sink)",
        new="branch.salt",
        tests=(f"{STORED}::test_a_session_with_a_window_comes_back",),
    ),
    Mutant(
        name="the-pages-of-the-pool-are-not-shared",
        file="branches/stored_state.py",
        old="Import(seq, metadata, branch.seq if shared else None, shared)",
        new="Import(seq, metadata)",
        tests=(f"{STORED}::test_rows_are_loaded_behind_shared_pages",),
    ),
    Mutant(
        name="nothing-is-copied-ahead",
        file="engine/steps.py",
        old="                    self.branches.save_ahead()",
        new="                    pass",
        tests=(f"{AHEAD}::test_what_would_go_next_is_copied_before",),
    ),
    Mutant(
        name="copies-come-after-a-reset",
        file="branches/stored_state.py",
        old="            self._bury(cancel=lambda job: not job.durable)\n",
        new="",
        tests=(f"{AHEAD}::test_a_reset_ends_copies",),
    ),
    Mutant(
        name="copies-ahead-end-whenever-pages-are-short",
        file="branches/stored_state.py",
        old="self._bury(cancel=self._holds_pages)",
        new="self._bury(cancel=lambda _: True)",
        tests=(f"{AHEAD}::test_what_is_not_copied_yet_is_copied_at_once",),
    ),
    Mutant(
        name="a-fork-goes-while-it-is-read",
        file="branches/object_writer.py",
        old="                self._changed.wait_for(lambda: first not in self._jobs)",
        new="                self._done.append(self._jobs.popleft())",
        tests=(f"{AHEAD}::test_jobs_that_are_cancelled_do_not_wait_for_others",),
    ),
)
