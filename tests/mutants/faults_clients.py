"""Faults in what clients of OpenAI's protocol rely on."""

from tests.mutants.harness import Mutant

MUTANTS = (
    Mutant(
        name="a-full-pool-is-no-full-context",
        file="engine/request_checks.py",
        old="                code=CONTEXT_FULL,\n",
        new="",
        tests=("server/test_client_fields.py::test_overflow_of_the_pool",),
    ),
    Mutant(
        name="cut-arguments-poison",
        file="engine/chat_rendering.py",
        old="with suppress(ValueError, RecursionError):",
        new="with suppress(RecursionError):",
        tests=("test_chat.py::test_arguments_that_are_no_object_are_taken",),
    ),
    Mutant(
        name="templates-get-text-for-objects",
        file="engine/chat_rendering.py",
        old='function["arguments"], found = {}, True',
        new="found = True",
        tests=("test_chat.py::test_arguments_that_are_no_object_are_taken",),
    ),
    Mutant(
        name="developers-are-unknown",
        file="engine/chat_rendering.py",
        old='if role == "developer" and not template.knows_developers:',
        new='if role == "developer":',
        tests=("test_chat.py::test_developers_are_systems_where_they_are_unknown",),
    ),
    Mutant(
        name="objects-stay-open",
        file="engine/grammar_text.py",
        old="        close_objects(schema)\n",
        new="        pass\n",
        tests=("engine/test_closed_objects.py::test_options_of_json",),
    ),
    Mutant(
        name="combinations-are-closed",
        file="engine/closed_objects.py",
        old="                _leave(node, schema, kept_open)\n",
        new="                pass\n",
        tests=("engine/test_closed_objects.py::test_which_objects_are_closed",),
    ),
    Mutant(
        name="white-space-by-default",
        file="engine/grammar_text.py",
        old="or not wanted.disable_any_whitespace:",
        new="or wanted.disable_any_whitespace:",
        tests=("engine/test_closed_objects.py::test_options_of_json",),
    ),
    Mutant(
        name="answers-are-searched-for-calls",
        file="server/chat.py",
        old="calls = replace(own, whole=True)",
        new="calls = own",
        tests=("server/test_chat.py::test_tools_together_with_a_form",),
    ),
    Mutant(
        name="cut-calls-are-content",
        file="server/tools.py",
        old="        if self._only_calls:\n            return\n",
        new="",
        tests=("server/test_chat.py::test_forced_calls_that_are_cut_short_are_no_content",),
    ),
    Mutant(
        name="any-tool-is-allowed",
        file="server/tool_choice.py",
        old='schema = schema_for(_those(tools, allowed), "required")',
        new='schema = schema_for(tools, "required")',
        tests=("server/test_chat.py::test_some_of_the_tools_are_allowed",),
    ),
    Mutant(
        name="an-effort-that-nobody-reads",
        file="server/thinking_fields.py",
        old='        elif effort != "none":\n',
        new="        elif False:\n",
        tests=("server/test_client_fields.py::test_reasoning_reaches_the_template_or_is_refused",),
    ),
    Mutant(
        name="allow-of-one-route",
        file="server/errors.py",
        old="        if error.status_code == 405:\n",
        new="        if False:\n",
        tests=("server/test_client_fields.py::test_allow_names_all_methods",),
    ),
)
