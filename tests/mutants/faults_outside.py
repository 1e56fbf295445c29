"""Faults that people from outside planted and no test found; one does now."""

from __future__ import annotations

from tests.mutants.harness import Mutant

MUTANTS = (
    Mutant(
        name="streams-of-the-server-without-their-salt",
        file="server/openai/replies.py",
        old='        "cache_salt": options.cache_salt,\n',
        new='        "cache_salt": None if reply.stream else options.cache_salt,\n',
        tests=("server/test_completions.py::test_cached_tokens",),
    ),
    Mutant(
        name="streams-without-their-salt",
        file="async_llm/llm.py",
        old="[prompt], sampling_params, adapter=adapter, cache_salt=cache_salt, hints=hints, blend=blend",
        new="[prompt], sampling_params, adapter=adapter, hints=hints, blend=blend",
        tests=("async_llm/test_async.py::test_salts_are_those_of_their_verbs",),
    ),
    Mutant(
        name="chats-without-their-salt",
        file="sessions/prompts.py",
        old="key = cache_key(cache_salt)\n        return",
        new="key = cache_key(None)\n        return",
        tests=("async_llm/test_async.py::test_chats",),
    ),
    Mutant(
        name="pages-of-an-import-not-blanked",
        file="kv/import_verbs.py",
        old="one.storage.blank(_rows_between(state, seq_id, index, length))",
        new="pass",
        tests=("kv/test_isolation.py::TestIsolation::test_pages_of_an_import_that_are_written_in_part",),
    ),
    Mutant(
        name="imports-outlive-their-sequence",
        file="kv/state.py",
        old="        import_verbs.end_import(self.parts, seq_id)\n        for part in self.parts:\n            part.remove(seq_id)\n",
        new="        for part in self.parts:\n            part.remove(seq_id)\n",
        tests=("kv/test_exchange.py::test_giving_up_gives_back_the_pages",),
    ),
    Mutant(
        name="state-kept-after-a-failure",
        file="engine/session_requests.py",
        old='output.finish_reason == "error" and not (session.pinned or session.modified)',
        new='output.finish_reason == "error" and False',
        tests=("sessions/test_sessions.py::test_what_a_failure_left_of_a_session_is_computed_again",),
    ),
    Mutant(
        name="norm-in-place-without-eps",
        file="ops/rows.py",
        old="y.square().mean(-1, keepdim=True).add_(eps).rsqrt_()",
        new="y.square().mean(-1, keepdim=True).rsqrt_()",
        tests=("models/test_norms.py::test_each_norm_rounds_once",),
    ),
    Mutant(
        name="norm-without-eps",
        file="ops/rows.py",
        old="return F.rms_norm(x, weight_E.shape, weight_E, eps)\n        # In",
        new="return F.rms_norm(x, weight_E.shape, weight_E, 0.0)\n        # In",
        tests=("models/test_norms.py::test_each_norm_rounds_once",),
    ),
    Mutant(
        name="ignored-stop-strings-are-held-back",
        file="text/detokenizer.py",
        old="depth[state] if self._next[state] else self._held[fallback]",
        new="depth[state]",
        tests=("text/test_detokenizer.py::test_of_a_stop_string_that_came_too_early_only_its_end_is_held_back",),
    ),
    Mutant(
        name="the-end-of-an-ignored-stop-string-is-not-held-back",
        file="text/detokenizer.py",
        old="depth[state] if self._next[state] else self._held[fallback]",
        new="depth[state] if self._next[state] else 0",
        tests=("text/test_detokenizer.py::test_of_a_stop_string_that_came_too_early_only_its_end_is_held_back",),
    ),
    Mutant(
        name="starts-of-a-failed-call-stay-kept",
        file="executor/transaction.py",
        old="            self._undo(part)\n        self._drop_starts()\n",
        new="            self._undo(part)\n",
        tests=("executor/test_recurrent_limits.py::test_a_failing_call_keeps_no_state_of_where_it_began",),
    ),
    Mutant(
        name="emulated-bfloat16-counts-as-fast",
        file="models/processor.py",
        old="            return instructions and self.onednn_bfloat16\n",
        new="            return self.onednn_bfloat16\n",
        tests=("models/test_processor.py::test_dtype_auto",),
    ),
)
