"""All verbs of the KV state in random order against the oracle, refusals included (see
``machine``).
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from quire.base.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unsupported,
)

from .machine import Machine
from .machine_exchange import ExchangeSteps

REFUSED_IN_EVERY_RUN: set[type[QuireError]] = {
    InvalidArgument,
    NotFound,
    Unsupported,
    FailedPrecondition,
    ResourceExhausted,
}
DONE_IN_EVERY_RUN = {
    "add_sequence",
    "remove_sequence",
    "fork_sequence",
    "popn",
    "enable_sliding_window_for_seq",
    "commit_accepted_token_tree_nodes",
    "begin_forward",
    "end_forward",
    "abort_forward",
    "missing_pages",
    "get_query_positions",
    "attention_with_fused_qkv",
    "append_kv",
    "self_attention",
    "cross_attention",
    "attention_with_shared_kv",
    "debug_get_kv",
    "debug_set_kv",
    "get_checkpoint_metadata",
    "prepare_import",
    "import_page_group",
    "finish_import",
    "import_need",
    "import_rows",
    "publish_import",
    "open_export",
}


def reset() -> None:
    Machine.operations, Machine.refusals, Machine.verbs = 0, {}, {}


def run_machine(examples: int, steps: int, *, derandomize: bool, machine: type[ExchangeSteps] = ExchangeSteps) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=derandomize,
            database=None,
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def refused_classes() -> set[type[QuireError]]:
    return {kind for _, kind in Machine.refusals}


def test_short() -> None:
    reset()
    # What is met depends on the version of Hypothesis.
    for number in range(9):
        run_machine(8, 45, derandomize=False, machine=seed(number)(type("Seeded", (ExchangeSteps,), {})))
        if (
            Machine.operations >= 700
            and set(Machine.verbs) >= DONE_IN_EVERY_RUN
            and refused_classes() >= REFUSED_IN_EVERY_RUN
        ):
            break
    assert Machine.operations >= 700
    assert set(Machine.verbs) >= DONE_IN_EVERY_RUN
    assert refused_classes() >= REFUSED_IN_EVERY_RUN


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long() -> None:
    reset()
    while Machine.operations < 100_000:
        run_machine(100, 100, derandomize=False)
    assert set(Machine.verbs) >= DONE_IN_EVERY_RUN
    assert refused_classes() >= REFUSED_IN_EVERY_RUN | {DataLoss}
    # What is refused for lack of room, and what a window has given up, is met by each verb that can
    # meet it.
    assert {verb for verb, kind in Machine.refusals if kind is ResourceExhausted} >= {
        "begin_forward",
        "debug_set_kv",
        "prepare_import",
    }
    assert {verb for verb, kind in Machine.refusals if kind is FailedPrecondition} >= {
        "fork_sequence",
        "popn",
        "enable_sliding_window_for_seq",
        "commit_accepted_token_tree_nodes",
        "begin_forward",
        "debug_get_kv",
        "debug_set_kv",
        "get_checkpoint_metadata",
        "cross_attention",
    }
