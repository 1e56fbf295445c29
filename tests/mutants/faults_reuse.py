"""Faults in what outputs say of the reuse of state."""

from __future__ import annotations

from tests.mutants.harness import Mutant

MUTANTS = (
    Mutant(
        name="what-the-prefix-cache-loses-is-not-told",
        file="branches/prefix_cache.py",
        old="            self._lost(entry.tokens, entry.key)\n",
        new="            pass\n",
        tests=("engine/test_reuse.py::test_evicted",),
    ),
    Mutant(
        name="covered-prefixes-are-told-as-lost",
        file="branches/prefix_cache.py",
        old=" and not node.children and len(node.sequences) == 1:",
        new=":",
        tests=("test_prefix_cache.py",),
    ),
    Mutant(
        name="forgotten-tokens-still-counted",
        file="branches/prefix_cache.py",
        old="            self.num_tokens -= node.edge.size\n",
        new="",
        tests=("test_prefix_cache.py",),
    ),
    Mutant(
        name="all-keys-are-one-owner",
        file="branches/adapter_keys.py",
        old="    return salt[0] if isinstance(salt, tuple) else salt\n",
        new='    return ""\n',
        tests=("server/test_reuse.py",),
    ),
    Mutant(
        name="others-are-quoted-where-the-cache-is-shared",
        file="server/generation.py",
        old='    return replace(reuse, quote="")',
        new="    return reuse",
        tests=("server/test_reuse.py",),
    ),
    Mutant(
        name="salts-of-others-are-told-where-the-cache-is-shared",
        file="server/generation.py",
        old="        return replace(reuse, miss=Miss.NONE, missed_at=None)",
        new="        return reuse",
        tests=("server/test_reuse.py",),
    ),
    Mutant(
        name="reuse-with-the-first-sample-that-ends",
        file="server/replies.py",
        old="ended == len(sources) * samples and",
        new="ended >= 1 and",
        tests=("server/test_reuse.py",),
    ),
    Mutant(
        name="state-from-memory-counted-as-the-pools",
        file="engine/scheduler.py",
        old='                request.reuse_note.by_tier["memory"] = request.computed - found\n',
        new="                pass\n",
        tests=("engine/test_reuse.py::test_an_idle_session_comes_back_from_host_memory",),
    ),
    Mutant(
        name="explained-again-after-a-preemption",
        file="engine/miss_search.py",
        old="if request.admitted or limit < LEAST or",
        new="if limit < LEAST or",
        tests=("engine/test_reuse.py::test_a_preempted_request_says_what_its_first_admission_found",),
    ),
    Mutant(
        name="text-that-a-session-replaces-not-noted",
        file="engine/session_branches.py",
        old="if LEAST <= common < min(session.computed, len(work.tokens)):",
        new="if common < 0:",
        tests=("engine/test_reuse.py::test_a_template_that_changes_old_turns",),
    ),
    Mutant(
        name="a-shorter-match-hides-the-longest",
        file="engine/reuse_note.py",
        old="at > self.missed_at)",
        new="at < self.missed_at)",
        tests=("engine/test_reuse.py",),
    ),
)
