"""Faults of what a newcomer meets: chat templates, the chat on a terminal, progress, limits."""

from __future__ import annotations

from tests.mutants.harness import Mutant

LIMITS = (
    Mutant(
        name="slowest-way-to-read-is-the-limit",
        file="../../bench/quire_bench/hardware.py",
        old="read_gbps=max(reads.values())",
        new="read_gbps=min(reads.values())",
        tests=("benchmarks/test_bench_groundwork.py::TestHardware::test_measure_reports_every_limit",),
    ),
    Mutant(
        name="packed-weights-not-tried",
        file="../../bench/quire_bench/hardware.py",
        old="return dtype not in supports or bool(getattr(torch.ops.mkldnn, supports[dtype])())",
        new="return False",
        tests=("benchmarks/test_bench_groundwork.py::TestHardware::test_measure_reports_every_limit",),
    ),
    Mutant(
        name="packed-product-of-something-else",
        file="../../bench/quire_bench/hardware.py",
        old='input_BI, packed, None, "none", [], "")',
        new='input_BI, packed, None, "relu", [], "")',
        tests=("benchmarks/test_bench_groundwork.py::TestHardware::test_packed_product_is_the_product",),
    ),
    Mutant(
        name="no-limit-for-integers",
        file="../../bench/quire_bench/hardware.py",
        old='kinds = {**_DTYPES, "int8": torch.int8}',
        new="kinds = dict(_DTYPES)",
        tests=("benchmarks/test_bench_groundwork.py::TestHardware::test_measure_reports_every_limit",),
    ),
)

TEMPLATES = (
    Mutant(
        name="end-of-a-turn-ends-no-answer",
        file="text/chat_templates.py",
        old="ends=() if end_id is None else (end_id,)",
        new="ends=()",
        tests=("text/test_chat_templates.py::test_a_built_in_template_ends_answers_where_the_model_has_its_token",),
    ),
    Mutant(
        name="template-for-tools-stays",
        file="text/tokenizer.py",
        old='other.chat_templates = {"default": template}',
        new='other.chat_templates = {**self.chat_templates, "default": template}',
        tests=("text/test_chat_templates.py::test_a_built_in_template_ends_answers_where_the_model_has_its_token",),
    ),
    Mutant(
        name="any-text-is-a-template",
        file="text/template_programs.py",
        old='    if "messages" not in _loaded(_tree(source, name)):\n',
        new="    if not source:\n",
        tests=(
            "text/test_chat_templates.py::test_what_is_no_template_is_refused_in_a_sentence_before_the_weights_are_read",
        ),
    ),
)

CHATS = (
    Mutant(
        name="loaded-text-is-not-dropped-first",
        file="cli/chat.py",
        old="branch.turns[count - branch.loaded :]",
        new="branch.turns[count:]",
        tests=("cli/test_cli.py::test_loaded_text_is_dropped_first",),
    ),
    Mutant(
        name="turns-begin-where-they-began-before-a-drop",
        file="cli/chat.py",
        old="[replace(turn, start=None) for turn in turns]",
        new="list(turns)",
        tests=("cli/test_remote_chat.py::test_a_full_context_and_the_ways_on",),
    ),
    Mutant(
        name="a-turn-after-a-drop-begins-in-the-middle",
        file="cli/chat.py",
        old="None if branch.rebuilt else before",
        new="before",
        tests=("cli/test_remote_chat.py::test_a_full_context_and_the_ways_on",),
    ),
    Mutant(
        name="first-answer-of-a-rebuilt-chat-stays",
        file="cli/chat.py",
        old="                session.rewind(to=len(output.prompt_token_ids))\n",
        new="                len(output.prompt_token_ids)\n",
        tests=("cli/test_remote_chat.py::test_a_full_context_and_the_ways_on",),
    ),
    Mutant(
        name="turns-that-were-undone-are-kept",
        file="cli/chat.py",
        old="        return len(session) == before\n",
        new="        return False\n",
        tests=("cli/test_cli.py::test_a_turn_that_an_interrupt_undid_is_none",),
    ),
)

PROGRESS = (
    Mutant(
        name="bars-in-pipes",
        file="engine/progress_bars.py",
        old="if show is None and on_terminal():",
        new="if show is None:",
        tests=("engine/test_progress.py::test_nothing_is_shown_where_nobody_looks",),
    ),
    Mutant(
        name="prompts-that-cannot-be-answered-are-run",
        file="cli/main.py",
        old="llm.requests.prepare(text, params, adapter=adapter).ids",
        new="llm.requests.prepare(text, adapter=adapter).ids",
        tests=("cli/test_cli.py::test_generate_refuses_before_it_runs_the_prompt",),
    ),
)

MUTANTS = (*LIMITS, *TEMPLATES, *CHATS, *PROGRESS)
