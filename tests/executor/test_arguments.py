"""Every public verb refuses arguments of wrong types with an error that names the argument, and
changes nothing.

The calls are generated: each verb of each class below, each of its parameters, each wrong value.
What a parameter takes is read from the text of its annotation here, and not by the code that checks
it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.executor.conftest import FakeIdentity, Tiny, check_pages, inputs, make_executor, prompt, token

from quire.base.config import ExecutorConfig
from quire.base.errors import FailedPrecondition, QuireError, Unsupported
from quire.base.sampling_params import SamplingParams
from quire.base.signatures import shown
from quire.build import EXECUTOR_FACTORY
from quire.channels.pair import channel_pair
from quire.contracts.executor import (
    AudioData,
    DecodeInput,
    ExecutorInputs,
    MemoryRequirements,
    ModelAssets,
    PrefillInput,
    TextData,
    VisionData,
)
from quire.contracts.layers import FullAttention, LatentAttention, Recurrent, StateTensor
from quire.executor.executor import Executor
from quire.executor.factory import Factory
from quire.executor.handle import Handle
from quire.executor.llm_executor import LlmExecutor
from quire.executor.named_executors import NamedExecutors
from quire.executor.request_sampling import ParamsSampling
from quire.kv.contract import ContractState
from quire.kv.state import State

WRONG: dict[str, Any] = {
    "None": None,
    "int": 42,
    "float": 1.5,
    "bool": True,
    "str": "x",
    "list": [],
    "list of None": [None],
    "object": object(),
    "Tensor": torch.ones(2, 2, dtype=torch.bool),
}
TAKEN = {
    "None": ("None", "TokenTreeParents"),
    "int": ("int", "float", "SeqId"),
    "float": ("float",),
    "bool": ("bool",),
    "str": ("str",),
    "list": ("Sequence", "Collection", "Iterable", "tuple", "TokenTreeParents"),
    "list of None": ("TokenTreeParents",),
    "Tensor": ("Tensor",),
    "object": (),
}
"""Words of an annotation that mean that a value of this kind is taken, or refused for other reasons
than its type.
"""
LATENT = LatentAttention(num_heads=2, row_dim=4, value_dim=2)
ATTENTION = FullAttention(num_heads=2, num_kv_heads=1, head_dim=4, value_dim=4)
RECURRENT = Recurrent(states=(StateTensor(shape=(1, 2, 2), dtype="float32"),))
INTERNAL = {
    "Executor": {"operation", "record_decode", "record_prefill"},
    "KVCache": {"take", "set_pending", "keep_path", "cut_chain", "mark", "mark_cut", "replace_content"},
    "ParamsSampling": {"draw"},
}
"""What other parts of the package call with values of their own."""


def is_taken(annotation: str, kind: str) -> bool:
    """Whether an annotation lets a value of this kind pass, for the verb to refuse or to use."""
    if annotation in ("object", "Any"):
        return True
    words = set(re.findall(r"\w+", re.sub(r"\[.*\]", "", annotation))) | {annotation}
    return bool(words & set(TAKEN[kind]))


def mixed() -> State:
    state = State(
        [ATTENTION, LATENT, RECURRENT],
        num_states=8,
        capacity=64,
        page_size=4,
    )
    state.add_sequence(0)
    return state


Good = dict[str, Callable[[], Any]]


@pytest.fixture(scope="module")
def subjects(tinies: dict[str, Tiny], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """One object of each class, and good values of parameters by name."""
    ex = make_executor(tinies["Llama"])
    handle = ex.prefill(prompt([1, 2, 3])).kv_cache
    attended = torch.zeros(1, 2, 4)
    good: Good = {
        "input": lambda: prompt([1]),
        "inputs": list,
        "handle": lambda: handle,
        "kv_cache": lambda: ex.create_kv_cache(),
        "executor": lambda: ex,
        "runner": lambda: ex.pool.runner,
        "identity": lambda: FakeIdentity("Llama"),
        "new_len": lambda: 1,
        "input_ids": lambda: torch.tensor([[1]]),
        "token_ids": lambda: torch.tensor([[1]]),
        "draft_tokens": list,
        "acceptance_threshold": lambda: 0.5,
        "assets": lambda: ModelAssets(path="nowhere"),
        "lora_id": lambda: 0,
        "batch_size": lambda: 1,
        "cache_id": lambda: "x",
        "name": lambda: "kv_cache_k_0",
        "config": lambda: ExecutorConfig(model_info=str(tinies["Llama"].path)),
        "resolve_device": lambda: torch.device,
        "make": lambda: ex.create_kv_cache,
        "num_steps": lambda: 1,
        "logits_RV": lambda: torch.zeros(1, 97),
        "logits_1V": lambda: torch.zeros(1, 97),
        "drafted": lambda: (),
        "token": lambda: 1,
        "vocab_size": lambda: 97,
        "params": lambda: SamplingParams(),
        "prompt_ids": lambda: (),
        "n": lambda: 1,
        "b": lambda: 0,
        "other": lambda: ex.create_kv_cache(batch_size=2),
        "data": lambda: b"",
        "lengths": lambda: [0],
        "layer": lambda: 0,
        "row": lambda: 0,
        "values": lambda: True,
        "wanted": lambda: True,
        "attention_mask": lambda: None,
        "position_ids": lambda: None,
        "logits": lambda: "all",
        "adapter": lambda: None,
        "parameter_memory": lambda: 1,
        "activation_memory_per_token": lambda: 1,
        "kv_cache_memory_per_token": lambda: 1,
        "overhead_memory": lambda: 1,
        "sequence_length": lambda: 1,
        "num_layers": lambda: 1,
        "seq_id": lambda: 0,
        "parent_id": lambda: 0,
        "child_id": lambda: 1,
        "pos": lambda: 0,
        "position": lambda: 0,
        "window": lambda: 4,
        "seq_ids": lambda: [0],
        "append_lengths": lambda: [1],
        "most": lambda: 1,
        "leaf_indices": lambda: [0],
        "sink": lambda: 0,
        "layer_id": lambda: 0,
        "source_layer_id": lambda: 0,
        "state_id": lambda: 0,
        "start": lambda: 0,
        "qkv": lambda: torch.zeros(1, 4, 4),
        "q": lambda: torch.zeros(1, 2, 4),
        "k": lambda: torch.zeros(1, 1, 4),
        "v": lambda: torch.zeros(1, 1, 4),
        "kv": lambda: torch.zeros(1, 4),
        "o1": lambda: attended,
        "o2": lambda: attended,
        "lse1": lambda: torch.zeros(1, 2),
        "lse2": lambda: torch.zeros(1, 2),
        "group": lambda: 0,
        "tensors": dict,
        "rows": dict,
        "metadata": dict,
        "specs": lambda: [RECURRENT],
        "capacity": lambda: 16,
        "num_states": lambda: 4,
        "num_sequences": lambda: 1,
        "length": lambda: 1,
        "begin": lambda: 0,
        "compressed_remote_position_map": lambda: [0],
        "channel": lambda: channel_pair()[0],
        "receiver": lambda: channel_pair()[0],
        "step": lambda: 1,
    }
    yield {
        "good": good,
        "Executor": (Executor, ex),
        "LlmExecutor": (LlmExecutor, LlmExecutor(ex)),
        "KVCache": (type(handle.cache), handle.cache),
        "Handle": (Handle, handle),
        "Factory": (Factory, EXECUTOR_FACTORY),
        "NamedExecutors": (NamedExecutors, NamedExecutors()),
        "ParamsSampling": (ParamsSampling, ParamsSampling(SamplingParams(), vocab_size=97)),
        "PrefillInput": (PrefillInput, prompt([1])),
        "DecodeInput": (DecodeInput, token(handle, 1)),
        "TextData": (TextData, inputs([1]).text),
        "VisionData": (VisionData, VisionData()),
        "AudioData": (AudioData, AudioData()),
        "ExecutorInputs": (ExecutorInputs, inputs([1])),
        "ModelAssets": (ModelAssets, ModelAssets(path="x")),
        "MemoryRequirements": (MemoryRequirements, None),
        "State": (State, None),
        "ContractState": (ContractState, ContractState(mixed())),
    }
    check_pages(ex)


CLASSES = [
    "Executor",
    "LlmExecutor",
    "KVCache",
    "Handle",
    "Factory",
    "NamedExecutors",
    "ParamsSampling",
    "PrefillInput",
    "DecodeInput",
    "TextData",
    "VisionData",
    "AudioData",
    "ExecutorInputs",
    "ModelAssets",
    "MemoryRequirements",
    "State",
    "ContractState",
]
SPECIAL: dict[tuple[str, str, str], Callable[[Any], Any]] = (
    {
        (cls, verb, "input"): lambda good: token(good["handle"](), 1)
        for cls in ("Executor",)
        for verb in ("decode", "speculative_decode")
    }
    | {
        ("LlmExecutor", verb, "inputs"): lambda _: inputs([1])
        for verb in ("prefill", "step", "sample_tokens", "sample_tokens_batch")
    }
    | {
        (cls, verb, name): lambda _, value=value: value
        for cls in ("ContractState",)
        for verb, name, value in (
            ("pages_at_most", "window", (4, 0)),
            ("append_mla_kv", "layer_id", 1),
            ("debug_set_kv", "k", torch.zeros(0, 1, 4)),
            ("debug_set_kv", "v", torch.zeros(0, 1, 4)),
            ("debug_set_kv", "layer", 0),
            ("get", "layer_id", 2),
            ("set", "layer_id", 2),
            ("debug_set", "layer_id", 2),
            ("debug_get", "layer_id", 2),
            ("linear_attention", "layer_id", 2),
            ("linear_attention", "q", torch.zeros(1, 1, 2)),
            ("linear_attention", "k", torch.zeros(1, 1, 2)),
            ("linear_attention", "v", torch.zeros(1, 1, 2)),
            ("set", "data", torch.zeros(1, 1, 2, 2)),
            ("debug_set", "data", torch.zeros(1, 2, 2)),
        )
    }
)
"""Good values where one name means several things."""


def verbs(name: str, cls: type, subject: Any) -> dict[str, Callable[..., Any]]:
    """The public methods of an object, and its class by its own name."""
    found: dict[str, Callable[..., Any]] = {name: cls} if name not in ("KVCache", "Handle", "ContractState") else {}
    hidden = set[str]().union(*(INTERNAL.get(base.__name__, set()) for base in cls.__mro__))
    for verb, _ in inspect.getmembers(cls, inspect.isfunction):
        if not verb.startswith("_") and verb not in hidden and subject is not None:
            found[verb] = getattr(subject, verb)
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_wrong_types_are_refused_by_name(subjects: dict[str, Any], name: str) -> None:
    cls, subject = subjects[name]
    good: Good = subjects["good"]
    tried, faults = 0, []
    for verb, call in verbs(name, cls, subject).items():
        parameters = inspect.signature(call).parameters
        if any(one.kind is one.VAR_POSITIONAL for one in parameters.values()):
            continue  # A verb that is refused whatever it is given.
        required = {
            one: SPECIAL.get((name, verb, one)) or (lambda _, one=one: good[one]())
            for one, parameter in parameters.items()
            if parameter.default is parameter.empty or (name, verb, one) in SPECIAL
        }
        for one, parameter in parameters.items():
            for kind, value in WRONG.items():
                if is_taken(str(parameter.annotation), kind) and kind != "Tensor":
                    continue
                if str(parameter.annotation) in ("object", "Any"):
                    continue
                given = {other: make(good) for other, make in required.items()} | {one: value}
                tried += 1
                if isinstance(subject, ContractState):
                    subject.clear()
                    subject.add_sequence(0)
                try:
                    call(**given)
                except QuireError as error:
                    if isinstance(error, Unsupported | FailedPrecondition) and kind == "Tensor":
                        continue  # No tensor would do.
                    message = str(error)
                    if not re.search(rf"\b{one}\b", message):
                        faults.append(f"{verb}({one}={shown(value)}): the message does not name it: {message}")
                    if (first := re.match(r"(\w+): ", message)) and first[1] != verb and first[1] in dir(cls):
                        faults.append(f"{verb}({one}={shown(value)}): the message names another verb: {message}")
                except Exception as error:
                    faults.append(f"{verb}({one}={shown(value)}): {type(error).__name__}: {error}")
                else:
                    faults.append(f"{verb}({one}={shown(value)}) is taken")
    assert not faults, "\n".join(faults)
    assert tried
