"""Faults of adapters: histories, keys, products, memory, files."""

from __future__ import annotations

from tests.mutants.harness import Mutant

MUTANTS = (
    Mutant(
        name="a-switch-keeps-a-run-of-no-token",
        file="base/types.py",
        old="kept = tuple(run for run in self.runs if run[0] < position)",
        new="kept = tuple(run for run in self.runs if run[0] <= position)",
        tests=("base/test_adapter_runs.py",),
    ),
    Mutant(
        name="histories-agree-behind-a-difference",
        file="base/types.py",
        old="if start < length and self.at(start) != other.at(start)), length)",
        new="if start < length and self.at(start) != other.at(start) and start), length)",
        tests=("base/test_adapter_runs.py",),
    ),
    Mutant(
        name="prefixes-shared-by-all-adapters",
        file="adapters/keys.py",
        old="return AdapterKey(salt, fingerprint_runs(runs, fingerprint_of)) if runs.ids else salt",
        new="return salt",
        tests=("adapters/test_adapters.py::test_cached_prefixes_belong_to_fingerprints",),
    ),
    Mutant(
        name="cached-prefixes-outlive-their-adapter",
        file="engine/named_adapters.py",
        old="                self._engine.forget_adapter(fingerprint)",
        new="                pass",
        tests=("adapters/test_named_adapters.py::test_another_adapter_under_an_old_name_sees_nothing_of_the_old_one",),
    ),
    Mutant(
        name="chunks-beyond-a-switch",
        file="engine/step_builder.py",
        old="            room = min(room, end - computed)",
        new="            pass",
        tests=("adapters/test_adapters.py::test_a_session_switches", "adapters/test_adapters.py::test_saved_histories"),
    ),
    Mutant(
        name="sessions-lend-what-another-adapter-computed",
        file="engine/session_requests.py",
        old="    shared = session.runs.agreed(work.runs, common)",
        new="    shared = common",
        tests=("adapters/test_adapters.py::test_a_chat_that_parts_from_the_session", "adapters/test_adapters.py"),
    ),
    Mutant(
        name="forks-hold-the-last-token-of-another-adapter",
        file="branches/session_branches.py",
        old="agreed = parent.runs.agreed(child.runs, length)\n",
        new="agreed = length\n",
        tests=("adapters/test_adapters.py::test_a_fork_within_another_run",),
    ),
    Mutant(
        name="files-without-their-adapters",
        file="sessions/saving.py",
        old='"adapters": runs,',
        new='"adapters": [],',
        tests=("adapters/test_adapters.py::test_saved_histories",),
    ),
    Mutant(
        name="replays-under-the-wrong-adapter",
        file="branches/extension.py",
        old="adapter = None if self.runs is BASE else self.runs.at(self.start + self.num_run)",
        new="adapter = None if self.runs is BASE else self.runs.at(len(self.branch.tokens))",
        tests=("executor/test_adapters.py::test_replay_runs_each_token_under_its_own",),
    ),
    Mutant(
        name="executors-share-across-adapters",
        file="executor/item_placement.py",
        old="            common = row.runs.agreed(wanted, common)\n",
        new="",
        tests=("executor/test_adapters.py::test_shared_prefixes_are_of_one_adapter",),
    ),
    Mutant(
        name="stale-rank-rows",
        file="adapters/low_rank.py",
        old="        self.b_SO[last:end].zero_()\n",
        new="",
        tests=("adapters/test_adapter_pool.py", "adapters/test_low_rank.py"),
    ),
    Mutant(
        name="padding-lands-in-results",
        file="adapters/low_rank.py",
        old="return sum_NO if part.kept is None else sum_NO.index_select(0, part.kept)",
        new="return sum_NO if part.kept is None else sum_NO[: len(part.kept)]",
        tests=("adapters/test_low_rank.py",),
    ),
    Mutant(
        name="the-first-used-stays",
        file="adapters/pool.py",
        old="            self._first[one] = self._first.pop(one)  # move it to the end: it is the most recently used",
        new="            pass",
        tests=("adapters/test_adapter_pool.py::test_the_one_used_longest_ago_gives_way",),
    ),
    Mutant(
        name="adapters-without-their-scale",
        file="adapters/peft.py",
        old="(b_OR.float() * update.scale)",
        new="(b_OR.float())",
        tests=("adapters/test_peft_reading.py::test_updates_are_rows_of_fused_maps_with_the_scale_in_b",),
    ),
    Mutant(
        name="root-scaled-adapters-scaled-plainly",
        file="adapters/peft_config.py",
        old="return alpha / (math.sqrt(rank) if self.root_scaled else rank)",
        new="return alpha / rank",
        tests=("adapters/test_peft_parity.py::test_options_are_as_peft_has_them",),
    ),
)
