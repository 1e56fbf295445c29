"""Faults of executors: positions that callers give, adapters in one piece."""

from __future__ import annotations

from tests.mutants.harness import Mutant

MUTANTS = (
    Mutant(
        name="prefixes-shared-wherever-their-tokens-stand",
        file="executor/item_placement.py",
        old="            common = common_prefix(stood, places[:common])\n",
        new="",
        tests=("executor/test_positions.py::test_prefixes_are_shared_as_far_as_tokens_stand_alike",),
    ),
    Mutant(
        name="rewinds-keep-positions",
        file="executor/row.py",
        old="        self.positions = _first(self.positions, length)\n",
        new="",
        tests=("executor/test_positions.py::test_going_back_takes_positions_back",),
    ),
    Mutant(
        name="copies-forget-where-tokens-stand",
        file="executor/row.py",
        old="self.positions = _first(None if positions is None else positions.fork(), length)",
        new="self.positions = None",
        tests=("executor/test_positions.py::test_every_copy_of_a_row_goes_on_where_it_stands",),
    ),
    Mutant(
        name="old-readers-take-files-with-positions",
        file="executor/serialized.py",
        old='"kind": KV_CACHE_WITH_POSITIONS if is_placed else KV_CACHE,',
        new='"kind": KV_CACHE,',
        tests=("executor/test_positions.py::test_files_say_where_tokens_stand_and_old_readers_refuse_them",),
    ),
    Mutant(
        name="nodes-stand-behind-the-row-and-not-behind-their-parents",
        file="executor/row_extension.py",
        old="before = found[parent] if parent >= 0 else row.next_position(start) - 1",
        new="before = row.next_position(start) - 1",
        tests=("executor/test_positions.py::test_verify_tree_and_speculation",),
    ),
    Mutant(
        name="positions-of-trees-taken-for-those-of-chains",
        file="executor/row_extension.py",
        old="usual.append(usual[parent] + 1 if parent >= 0 else start)",
        new="usual.append(start + len(usual))",
        tests=("executor/test_positions.py::test_tree_positions_that_look_like_indices_are_not_taken_for_defaults",),
    ),
    Mutant(
        name="chunks-all-rotated-as-the-first",
        file="executor/transaction.py",
        old="new.positions[first : first + count]",
        new="new.positions[:count]",
        tests=("executor/test_positions.py::test_chunks_of_one_call_and_rows_of_a_batch",),
    ),
    Mutant(
        name="positions-in-a-row-with-a-window",
        file="executor/row_extension.py",
        old="if self.new.positions is not None and self.row.window is not None:",
        new="if self.new.positions is not None and facts.row_window is not None:",
        tests=("executor/test_positions.py::test_a_row_with_a_window_of_its_own",),
    ),
    Mutant(
        name="archives-of-any-number-of-files",
        file="adapters/peft_files.py",
        old="MAX_MEMBERS + 1))) > MAX_MEMBERS:",
        new="MAX_MEMBERS + 1))) > 2 * MAX_MEMBERS:",
        tests=("executor/test_packed_adapters.py::test_what_is_refused",),
    ),
    Mutant(
        name="files-of-adapters-stand-elsewhere-afterwards",
        file="adapters/assets.py",
        old="                assets.file.seek(place)",
        new="                pass",
        tests=("executor/test_packed_adapters.py::test_every_source_gives_the_adapter_of_the_directory",),
    ),
)
