"""Faults in chunks for blending: keys, matching, capture, loading."""

from __future__ import annotations

from tests.mutants.harness import Mutant

RETRIEVER = "blend/test_chunk_retriever.py::"
CAPTURE = "blend/test_chunk_capture.py::"
MATCHING = "blend/test_chunk_matching.py::"

MUTANTS = (
    Mutant(
        name="chunks-by-hashes-alone",
        file="blend/chunk_matching.py",
        old="if sums.digest(self.parent, start, stop) != key.digest]",
        new="if False]",
        tests=(MATCHING + "test_hashes_alone_decide_nothing",),
    ),
    Mutant(
        name="later-chunks-of-equal-sets",
        file="blend/chunk_matching.py",
        old="if weights[index] + best[follow[index]] == best[index]:",
        new="if best[index] > best[index + 1]:",
        tests=(MATCHING + "test_equal_sets_are_told_apart_by_their_beginning",),
    ),
    Mutant(
        name="chunks-that-touch-overlap",
        file="blend/chunk_matching.py",
        old="np.searchsorted(from_C, to_C).tolist()",
        new='np.searchsorted(from_C, to_C, "right").tolist()',
        tests=(MATCHING + "test_the_best_set_is_found",),
    ),
    Mutant(
        name="rows-from-the-chunk's-start",
        file="blend/retriever.py",
        old="one[part.skip : part.skip + part.count]",
        new="one[: part.count]",
        tests=(RETRIEVER + "test_anywhere_without_marks",),
    ),
    Mutant(
        name="late-chunks-promised-again",
        file="blend/retriever.py",
        old="            self._catalog.drop(fetch.key)",
        new="            pass",
        tests=(RETRIEVER + "test_what_does_not_come_in_time",),
    ),
    Mutant(
        name="forgotten-tasks-stay",
        file="blend/retriever.py",
        old="partial(_on_answer, weakref.ref(self))",
        new="partial(_on_answer, lambda: self)",
        tests=(RETRIEVER + "test_a_forgotten_task_is_gone",),
    ),
    Mutant(
        name="private-chunks-on-disks",
        file="blend/chunk_catalog.py",
        old="is_written = self.store.is_durable and not private and",
        new="is_written = self.store.is_durable and",
        tests=(CAPTURE + "test_durable_tiers_are_written_behind",),
    ),
    Mutant(
        name="lists-undo-what-happened-meanwhile",
        file="blend/chunk_catalog.py",
        old="            _apply(found, asked.changes)",
        new="            pass",
        tests=(CAPTURE + "test_what_happens_while_a_list_is_made_counts",),
    ),
)
