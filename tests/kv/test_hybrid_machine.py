"""All verbs of ``State`` in random order against the oracle, refusals included (see
``machine_hybrid``).
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
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
from .machine_hybrid import HybridSteps

REFUSED: set[type[QuireError]] = {InvalidArgument, NotFound, Unsupported, FailedPrecondition, ResourceExhausted}
DONE = {
    "fork_sequence",
    "popn",
    "rewind_cost",
    "enable_sliding_window_for_seq",
    "commit_accepted_token_tree_nodes",
    "begin_forward",
    "end_forward",
    "abort_forward",
    "attention_with_fused_qkv",
    "linear_attention",
    "convolve",
    "get",
    "set",
    "checkpoint",
    "drop_checkpoint",
    "debug_get",
    "debug_set",
    "prepare_import",
    "import_page_group",
    "finish_import",
    "import_need",
    "import_rows",
    "publish_import",
    "open_export",
}


def run_machine(examples: int, steps: int, *, derandomize: bool) -> None:
    run_state_machine_as_test(
        HybridSteps,
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


def met() -> tuple[set[str], set[type[QuireError]]]:
    """Verbs that went through, and classes of refusals, so far."""
    return set(Machine.verbs), {kind for _, kind in Machine.refusals}


def reset() -> None:
    Machine.operations, Machine.refusals, Machine.verbs = 0, {}, {}


def test_short() -> None:
    reset()
    # What is met depends on the version of Hypothesis.
    for steps in range(40, 52):
        run_machine(10, steps, derandomize=True)
        done, refused = met()
        if Machine.operations >= 1500 and done >= DONE and refused >= REFUSED:
            break
    assert Machine.operations >= 1500
    assert done >= DONE
    assert refused >= REFUSED


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long() -> None:
    reset()
    while Machine.operations < 50_000:
        run_machine(60, 100, derandomize=False)
    done, refused = met()
    assert done >= DONE
    assert refused >= REFUSED | {DataLoss}
    assert {verb for verb, kind in Machine.refusals if kind is ResourceExhausted} >= {
        "begin_forward",
        "debug_set",
        "prepare_import",
    }
