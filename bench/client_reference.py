"""The expected results for clients: the engine's own, in this process, one request at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from quire.base.sampling_params import SamplingParams
from quire.llm import LLM

PROMPT = "def fib(n):"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": PROMPT}]
FORM: dict[str, Any] = {
    "title": "Weather",
    "description": "The weather of a city.",
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Paris"]},
        "days": {"type": "integer", "enum": [1, 2, 3]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
STOPS = ("1", "(", ".", ":", "_")
CONTINUATIONS = (
    ("def add(a, b):", "\n    return a + b\n"),
    ("def add(a, b):", "\n    return a - b\n"),
    ("class Stack:\n    def __init__(self):", "\n        self.items = []\n"),
    ("for i in", " range(10):"),
    ("import", " os"),
)
"""The inputs that lm-eval scores: contexts, which end without a space as lm-eval would move it, and
possible continuations."""
LOGPROB_TOLERANCE = 1e-4
"""Tolerance of one token's log-probability, in float32: the server may run it in another batch,
with other kernels, than the engine here."""


class Reference:
    """The expected results: from the engine itself, one request at a time."""

    def __init__(self, model: str) -> None:
        self.model = model
        """A checkpoint with a chat template."""
        self.llm = LLM(model, device="cpu", dtype="float32", enable_prefix_caching=False, kv_cache_memory="64MiB")

    def texts(self, prompt: str, **params: Any) -> list[str]:
        """Return the text of each sample."""
        output = self.llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]
        return [sample.text for sample in output.outputs]

    def answer(self, messages: list[dict[str, Any]], **params: Any) -> str:
        """Return the answer to a chat."""
        return self.llm.chat(messages, SamplingParams(**params), use_tqdm=False)[0].outputs[0].text

    def logprobs(self, prompt: str, **params: Any) -> list[float]:
        """Return the log-probability of each generated token."""
        sample = self.llm.generate(prompt, SamplingParams(**params, logprobs=0), use_tqdm=False)[0].outputs[0]
        return [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs or [], strict=True)]

    def likelihood(self, context: str, continuation: str) -> tuple[float, bool, int]:
        """Return the log-probability of ``continuation``, True if it is the greedy one, and its
        number of tokens."""
        tokenizer = self.llm.tokenizer
        assert tokenizer is not None
        before, whole = tokenizer.encode(context), tokenizer.encode(context + continuation)
        after = list(whole[len(before) :])
        with self.llm.session(list(whole[: len(before)])) as session:
            scores = session.score(after)
        params = SamplingParams(temperature=0, max_tokens=len(after), ignore_eos=True)
        greedy = self.llm.generate([list(whole[: len(before)])], params, use_tqdm=False)[0].outputs[0].token_ids
        return sum(scores), list(greedy) == after, len(after)

    def details(self, model: str) -> dict[str, Any]:
        """Return the expected values of "details", by name; ``model`` is the served one."""
        text = self.texts(PROMPT, **GREEDY)[0]
        stop = text[4:8]
        samples = self.texts(PROMPT, temperature=1.2, max_tokens=10, n=3, seed=11)
        asked = [f"def f{number}(" for number in range(8)]
        scores = [self.likelihood(*pair) for pair in CONTINUATIONS]
        until = self.texts(PROMPT, **GREEDY, stop=["\n\n"])[0]
        ways = ("tokens", "tokens, 4 in a body", "text, 4 at a time")
        answers = [self.answer([{"role": "user", "content": one}], **GREEDY) for one in asked[:4]]
        return {
            "openai-chat": {
                "models.list": [model],
                "completions": text,
                "completions, stream": text,
                "completions, n and seed": samples,
                "completions, n and seed, stream": samples,
                "completions, stop": [text.partition(stop)[0], "stop"],
                "completions, logprobs": self.logprobs(PROMPT, **GREEDY),
                "chat, logprobs": self.answer(MESSAGES, **GREEDY),
                "chat, regex": 4,
                "error, temperature": [400, "temperature"],
                "error, model": [404, "model"],
                "async, 8 at a time": [self.texts(one, **GREEDY)[0] for one in asked],
            },
            "openai-responses": [True, True, 3],
            "anthropic": [[True, True], True],
            "ollama": {
                "list": [model],
                "ps": [model],
                "show": [True, ["completion", "tools"]],
                "raw": text,
                "raw, stream": text,
                "load": "load",
                "history": 16,
                "refusals": [["embed", 400], ["model", 404], ["pull", 404]],
            },
            "node-ollama": [[model], [model], True, True, text],
            "agents-chat": [True],
            "agents-responses": [True],
            **{f"langchain-{kind}": answers for kind in ("chat", "responses", "anthropic")},
            "lm-eval": {
                **{f"loglikelihood, {way}": [score for score, _, _ in scores] for way in ways},
                **{f"loglikelihood, {way}, greedy": [own for _, own, _ in scores] for way in ways},
                **{f"generate_until, {way}": until for way in ways},
            },
        }


def difference(found: Any, wanted: Any, where: str = "") -> str | None:
    """Return a description of the difference of a value from the wanted one; None if they are
    equal, with numbers about equal."""
    if isinstance(wanted, dict) and isinstance(found, dict) and set(found) == set(wanted):
        pairs: list[tuple[str, Any, Any]] = [(name, found[name], wanted[name]) for name in wanted]
    elif isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        pairs = [(where, own, other) for own, other in zip(found, wanted, strict=True)]
    elif isinstance(wanted, float) and isinstance(found, float):
        # About the number of tokens of the longest scored text.
        near = math.isclose(found, wanted, rel_tol=0, abs_tol=LOGPROB_TOLERANCE * 16)
        return None if near else f"{where}: {found!r} instead of {wanted!r}".removeprefix(": ")
    else:
        return None if found == wanted else f"{where}: {found!r:.200} instead of {wanted!r:.200}".removeprefix(": ")
    return next((said for name, own, other in pairs if (said := difference(own, other, name)) is not None), None)


def is_form(found: Any) -> bool:
    """Return True if a value is an object of ``FORM``, or its JSON."""
    try:
        value = json.loads(found) if isinstance(found, str) else found
        return set(value) == {"city", "days"} and value["city"] in ("Rome", "Paris") and value["days"] in (1, 2, 3)
    except (ValueError, TypeError, LookupError):
        return False


def complaint(ability: str, value: Any, text: str, details: Any) -> str | None:
    """Return the error in a client's value for an ability; None if it is right. ``text`` and
    ``details`` are the wanted values."""
    if ability in ("text", "retry"):
        return difference(value, text)
    if ability == "stream":
        pieces: Sequence[str] = value
        if sum(map(bool, pieces)) < 2:
            return f"it came in one piece: {pieces!r:.200}"
        return difference("".join(pieces), text)
    if ability == "tools":
        wrong = [call for call in value["calls"] if call[0] != "weather" or not is_form(call[1])]
        if wrong or not value["calls"]:
            return f"calls {value['calls']!r:.200} are not of the form that was asked for"
        return None if isinstance(value["after"], str) else f"after the call came {value['after']!r:.200}"
    if ability == "structured":
        wrong = [one for one in value if not is_form(one)]
        return f"{wrong[0]!r:.200} is not of the form that was asked for" if wrong else None
    if ability == "details":
        return difference(value, details)
    return None if value is True else f"the client told {value!r:.200}"
