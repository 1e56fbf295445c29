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
)
