"""Faults in what outputs say of the reuse of state."""

from __future__ import annotations

from tests.mutants.harness import Mutant

MUTANTS = (
    Mutant(
        name="what-the-prefix-cache-loses-is-not-told",
        file="branches/prefix_cache.py",
        old="            self._lost(np.concatenate(node.edges()), entry.key)\n",
        new="            pass\n",
        tests=("engine/test_reuse.py::test_evicted",),
    ),
    Mutant(
        name="covered-prefixes-are-told-as-lost",
        file="branches/prefix_cache.py",
        old=" and not node.children and len(node.sequences) == 1:",
        new=":",
        tests=("branches/test_prefix_cache.py",),
    ),
    Mutant(
        name="forgotten-tokens-still-counted",
        file="branches/prefix_cache.py",
        old="            self.num_tokens -= node.edge.size\n",
        new="",
        tests=("branches/test_prefix_cache.py",),
    ),
    Mutant(
        name="all-keys-are-one-owner",
        file="adapters/keys.py",
        old="    return salt[0] if isinstance(salt, tuple) else salt\n",
        new='    return ""\n',
        tests=("server/test_reuse.py",),
    ),
    Mutant(
        name="others-are-quoted-where-the-cache-is-shared",
        file="server/openai/generation.py",
        old='    return replace(reuse, quote="")',
        new="    return reuse",
        tests=("server/test_reuse.py",),
    ),
    Mutant(
        name="salts-of-others-are-told-where-the-cache-is-shared",
        file="server/openai/generation.py",
        old="        return replace(reuse, miss=Miss.NONE, missed_at=None)",
        new="        return reuse",
        tests=("server/test_reuse.py",),
    ),
    Mutant(
        name="a-stream-ends-without-its-reuse",
        file="server/openai/replies.py",
        old="            yield {**held, **self.quire(outputs)}",
        new="            yield held",
        tests=("server/test_reuse.py",),
    ),
    Mutant(
        name="state-from-memory-counted-as-the-pools",
        file="engine/request.py",
        old="            self.seat.reuse.by_tier |= found.by_tier\n",
        new="",
        tests=("engine/test_reuse.py::test_an_idle_session_comes_back_from_host_memory",),
    ),
    Mutant(
        name="explained-again-after-a-preemption",
        file="engine/miss_search.py",
        old="if request.seat.admitted or limit < LEAST or",
        new="if limit < LEAST or",
        tests=("engine/test_reuse.py::test_a_preempted_request_says_what_its_first_admission_found",),
    ),
    Mutant(
        name="text-that-a-session-replaces-not-noted",
        file="engine/session_requests.py",
        old="if LEAST <= common < min(session.computed, len(work.tokens)):",
        new="if common < 0:",
        tests=("engine/test_reuse.py::test_a_template_that_changes_old_turns",),
    ),
    Mutant(
        name="a-shorter-match-hides-the-longest",
        file="engine/request.py",
        old="at > self.missed_at)",
        new="at < self.missed_at)",
        tests=("engine/test_reuse.py",),
    ),
)
