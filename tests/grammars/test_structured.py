"""Structured outputs against masks by brute force: every token of the vocabulary is tried on every
beginning of every text.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
import tokenizers
from tests.small_llms import Checkpoint, MakeLLM, check, engine_of, greedy, make_checkpoint, random_tokens, record

from quire import LLM, InvalidArgument, QuireError, SamplingParams, StructuredOutputs, Unsupported
from quire.grammars.formats import grammar_text
from quire.grammars.grammars import Grammars, RowGrammars
from quire.grammars.matcher import GrammarMatcher
from quire.text.token_bytes import TokenBytes
from small_tokenizers import saved

PADDING = 13
"""Ids of the model that its tokenizer does not have."""


@dataclass
class Spelled:
    """A checkpoint with a tokenizer, and the bytes of its tokens."""

    checkpoint: Checkpoint
    pieces: list[bytes]
    """Of every id of the model; empty for special and padding ones."""
    eos: int

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def id(self, piece: bytes) -> int:
        return self.pieces.index(piece)


def spell(folder: Path, kind: str, **changes: Any) -> Spelled:
    backend = tokenizers.Tokenizer.from_str(saved(kind))
    table = TokenBytes(backend)
    eos = backend.token_to_id("</s>")
    checkpoint = make_checkpoint(
        "llama", folder, **{"vocab_size": table.size + PADDING, "eos_token_id": eos, **changes}
    )
    (folder / "tokenizer.json").write_text(saved(kind))
    pieces = [b"" if i in table.special_ids else table.piece(i) for i in range(table.size + PADDING)]
    return Spelled(checkpoint, pieces, eos)


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Spelled]:
    known: dict[str, Spelled] = {}

    def get(kind: str) -> Spelled:
        if kind not in known:
            known[kind] = spell(tmp_path_factory.mktemp(kind), kind)
        return known[kind]

    return get


# -- languages -------------------------------------------------------------------------------------


@dataclass
class Language:
    """What is asked for, and which texts are in it: as a whole, and as a beginning."""

    wanted: dict[str, Any]
    whole: Callable[[bytes], bool]
    begins: Callable[[bytes], bool]
    """Whether a text can be completed."""
    grows: Callable[[bytes], bool]
    """Whether something can be added to a text."""


def finite(wanted: dict[str, Any], texts: Sequence[str]) -> Language:
    words = {text.encode() for text in texts}
    beginnings = {word[:end] for word in words for end in range(len(word) + 1)}
    inner = {word[:end] for word in words for end in range(len(word))}
    return Language(wanted, words.__contains__, beginnings.__contains__, inner.__contains__)


def balanced(text: bytes) -> bool:
    return re.fullmatch(rb"a*b*", text) is not None and text.count(b"a") >= text.count(b"b")


STRIPPED = {"x-guidance": {"whitespace_flexible": False}}
FLAGS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "é": {"enum": ["ü", None, 10, 'a"b']}},
    "required": ["on"],
    "additionalProperties": False,
    **STRIPPED,
}
FLAG_TEXTS = [
    "{" + ",".join(parts) + "}"
    for on in ("true", "false")
    for rest in ([], *([f'"é":{value}'] for value in ('"ü"', "null", "10", '"a\\"b"')))
    for parts in [[f'"on":{on}', *rest]]
]
NUMBER = r"-?[0-9]+(\.[0-9]{2})?"
LANGUAGES = {
    "choice": finite(
        {"choice": ["the", "the quick", "def fib", "日本", ' "\\\n', "2 < 1", "the"]},
        ["the", "the quick", "def fib", "日本", ' "\\\n', "2 < 1"],
    ),
    "regex": finite(
        {"regex": r"[ab]{1,3}(cd|ø/)?"},
        ["".join(w) + end for n in (1, 2, 3) for w in itertools.product("ab", repeat=n) for end in ("", "cd", "ø/")],
    ),
    "number": Language(
        {"regex": NUMBER},
        lambda text: re.fullmatch(NUMBER.encode(), text) is not None,
        lambda text: re.fullmatch(rb"-?([0-9]+(\.[0-9]{0,2})?)?", text) is not None,
        lambda text: re.fullmatch(NUMBER.encode(), text + b"0") is not None or b"." not in text or text[-1:] == b".",
    ),
    "json": finite({"json": FLAGS}, FLAG_TEXTS),
    "lark": Language(
        {"grammar": 'start: "a" start "b" | "ab"'},
        lambda text: balanced(text) and text.count(b"a") == text.count(b"b") > 0,
        balanced,
        lambda text: not text or text.count(b"a") > text.count(b"b"),
    ),
    "gbnf": finite(
        {"grammar": 'root ::= ("lazy" | "la") " "? [xy]'},
        ["lazy x", "lazy y", "lazyx", "lazyy", "la x", "la y", "lax", "lay"],
    ),
}


def naive(model: Spelled, prompt: Sequence[int], language: Language, params: SamplingParams) -> tuple[list[int], str]:
    """The greedy tokens and why they end, one forward of transformers' model for each."""
    text, output = b"", list[int]()
    ends = ({model.eos} if not params.ignore_eos else set()) | params.stop_ids
    while True:
        logits = model.checkpoint.logits([*prompt, *output])[-1].clone()
        allowed = {
            token
            for token, piece in enumerate(model.pieces)
            if piece and token not in ends and language.begins(text + piece)
        }
        if language.whole(text) and len(output) >= params.min_tokens:
            allowed |= ends
        if not allowed:
            assert language.whole(text)
            return output, "stop"
        for token, bias in params.token_bias.items():
            logits[token] += bias
        for token in set(prompt) | set(output):
            z, penalty = float(logits[token]), params.repetition_penalty
            logits[token] = z / penalty if z > 0 else z * penalty
        for token in set(output):
            logits[token] -= params.presence_penalty
        token = max(sorted(allowed), key=lambda i: float(logits[i]))
        output.append(token)
        if token in ends:
            return output, "stop"
        text += model.pieces[token]
        if language.whole(text) and not language.grows(text):
            return output, "stop"
        if len(output) == params.max_tokens:
            return output, "length"


KINDS = ("byte_level", "sentencepiece", "gemma")


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_brute_force(make_llm: MakeLLM, spelled: Callable[[str], Spelled], kind: str) -> None:
    """All languages and variations of parameters in one batch."""
    model = spelled(kind)
    llm = make_llm(model.checkpoint)
    rng = np.random.default_rng(3)
    somewhere = {
        int(token): float(bias)
        for token, bias in zip(rng.integers(0, model.vocab_size, 60), rng.normal(0, 5, 60), strict=True)
    }
    changes: list[dict[str, Any]] = [
        {},
        {"logit_bias": somewhere, "repetition_penalty": 1.7, "presence_penalty": 0.9},
        {"min_tokens": 3},
        {"ignore_eos": True},
        {"stop_token_ids": [model.id(b"a"), model.id(b"0")]},
        {"logit_bias": {model.eos: 100, model.vocab_size - 1: 100, 0: 100}},
        {"logit_bias": {model.eos: -100}},
    ]
    prompts, params, expected, languages = [], [], [], []
    for number, ((name, language), change) in enumerate(itertools.product(LANGUAGES.items(), changes)):
        if name == "json" and "stop_token_ids" in change:
            continue  # an "a" that ends the text leaves no way to spell "false"
        prompts.append(random_tokens(6, seed=number))
        params.append(SamplingParams(temperature=0, max_tokens=14, structured_outputs=language.wanted, **change))
        expected.append(naive(model, prompts[-1], language, params[-1]))
        languages.append(language)
    outputs = llm.generate(prompts, params)
    for output, wanted, language in zip(outputs, expected, languages, strict=True):
        found = output.outputs[0]
        assert (found.token_ids, found.finish_reason) == wanted, (language.wanted, found.text)
        # A text that is cut off may end inside of a character.
        text = found.text.rstrip("\ufffd").encode()
        assert text == b"".join(model.pieces[token] for token in found.token_ids)[: len(text)]
        assert language.whole(text) if found.finish_reason == "stop" else language.begins(text)
    assert {reason for _, reason in expected} == {"stop", "length"}
    check(llm)


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_in_the_language(make_llm: MakeLLM, spelled: Callable[[str], Spelled], kind: str) -> None:
    model = spelled(kind)
    llm = make_llm(model.checkpoint)
    for language in LANGUAGES.values():
        params = SamplingParams(n=6, seed=1, temperature=1.3, max_tokens=40, structured_outputs=language.wanted)
        # The last prompt is a BOS alone, after which a text begins.
        for output in llm.generate(["fox", "{", [1]], params):
            for sample in output.outputs:
                text = sample.text.rstrip("\ufffd").encode()
                assert language.whole(text) if sample.finish_reason == "stop" else language.begins(text)
            assert any(sample.finish_reason == "stop" for sample in output.outputs)
    check(llm)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": -20, "maximum": 300},
        "tags": {"type": "array", "items": {"enum": ["fox", "dog"]}, "minItems": 1, "maxItems": 3},
        "date": {"type": "string", "format": "date"},
        "next": {"$ref": "#/$defs/leaf"},
    },
    "required": ["name", "size", "tags", "date", "next"],
    "additionalProperties": False,
    "$defs": {
        "leaf": {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {"next": {"$ref": "#/$defs/leaf"}},
                    "required": ["next"],
                    "additionalProperties": False,
                },
            ]
        }
    },
}


def validate(value: Any) -> None:
    def leaf(node: Any) -> None:
        if node is not None:
            assert list(node) == ["next"]
            leaf(node["next"])

    assert list(value) == ["name", "size", "tags", "date", "next"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert type(value["size"]) is int
    assert -20 <= value["size"] <= 300
    assert 1 <= len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"fox", "dog"}
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", value["date"])
    leaf(value["next"])


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", KINDS)
def test_json_validates(make_llm: MakeLLM, spelled: Callable[[str], Spelled], kind: str) -> None:
    llm = make_llm(spelled(kind).checkpoint)
    for wanted in ({"json": SCHEMA}, StructuredOutputs(json=json.dumps(SCHEMA))):
        params = SamplingParams(n=8, seed=5, max_tokens=160, structured_outputs=wanted)
        (output,) = llm.generate("The lazy dog", params)
        finished = [sample for sample in output.outputs if sample.finish_reason == "stop"]
        assert finished
        for sample in finished:
            validate(json.loads(sample.text))
        for sample in output.outputs:
            assert sample.finish_reason in ("stop", "length")
            if sample.finish_reason == "length":
                assert len(sample.token_ids) == 160
    params = SamplingParams(
        n=8, seed=5, max_tokens=60, structured_outputs={"json_object": True}, logit_bias={spelled(kind).id(b"}"): 4}
    )
    for sample in llm.generate("x", params)[0].outputs:
        assert sample.finish_reason != "stop" or isinstance(json.loads(sample.text), dict)


def test_a_pydantic_class(python_llm: LLM) -> None:
    """What comes out is an object of the class, nested ones included."""
    pydantic = pytest.importorskip("pydantic")
    limits = {"whitespace_flexible": False}

    class Size(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        width: int = pydantic.Field(ge=0, le=9)
        height: int = pydantic.Field(ge=0, le=9)

    class Part(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid", json_schema_extra={"x-guidance": limits})
        kind: Any = pydantic.Field(json_schema_extra={"enum": ["a", "b"]})
        sizes: list[Size] = pydantic.Field(max_length=2)

    params = SamplingParams(n=3, seed=1, max_tokens=120, structured_outputs=StructuredOutputs(json=Part))
    for sample in python_llm.generate("part = ", params)[0].outputs:
        assert sample.finish_reason == "stop"
        found = Part.model_validate_json(sample.text)
        assert found.kind in ("a", "b")


def test_white_space_has_an_end(make_llm: MakeLLM, spelled: Callable[[str], Spelled]) -> None:
    """A model that is fond of white space still comes to an end."""
    model = spelled("byte_level")
    spaces = {token: 60.0 for token, piece in enumerate(model.pieces) if piece and not piece.strip()}
    schema = {"type": "array", "items": {"const": 7}, "maxItems": 2}
    flexible = {**schema, "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": " ?"}}
    params = greedy(200, ignore_eos=False, logit_bias=spaces)
    llm = make_llm(model.checkpoint)
    for spaced, wanted in (
        (False, {"json": schema}),
        (True, {"json": schema, "disable_any_whitespace": False}),
        (True, {"json": schema, "whitespace_pattern": " {0,2}"}),
        (True, {"json": flexible}),
        (False, {"json": {**schema, "x-guidance": {"whitespace_flexible": False}}, "disable_any_whitespace": False}),
    ):
        (output,) = llm.generate("x", params.replace(structured_outputs=wanted))
        assert output.outputs[0].finish_reason == "stop"
        assert json.loads(output.outputs[0].text) in ([], [7], [7, 7])
        assert any(c.isspace() for c in output.outputs[0].text) == spaced


# -- nothing else changes it -----------------------------------------------------------------------


def mixed(seed: int) -> list[SamplingParams]:
    wanted = [language.wanted for language in LANGUAGES.values()]
    return [
        SamplingParams(seed=seed + i, max_tokens=12, structured_outputs=w, n=1 + i % 2, repetition_penalty=1.2)
        for i, w in enumerate([*wanted, None, *wanted])
    ]


def samples(outputs: Sequence[Any]) -> list[list[tuple[list[int], str]]]:
    return [[(sample.token_ids, sample.finish_reason) for sample in output.outputs] for output in outputs]


def test_the_same_alone_in_batches_and_when_preempted(make_llm: MakeLLM, spelled: Callable[[str], Spelled]) -> None:
    model = spelled("byte_level")
    params = mixed(7)
    prompts = [random_tokens(20, seed=i) for i in range(len(params))]
    together = samples(make_llm(model.checkpoint).generate(prompts, params))
    alone = make_llm(model.checkpoint, enable_prefix_caching=False)
    assert [samples(alone.generate(p, q))[0] for p, q in zip(prompts, params, strict=True)] == together
    tight = make_llm(model.checkpoint, pool=96, page_size=4, max_num_batched_tokens=16)
    assert samples(tight.generate(prompts, params)) == together
    assert engine_of(tight).scheduler.num_preemptions > 0
    check(tight)


def test_sessions(make_llm: MakeLLM, spelled: Callable[[str], Spelled]) -> None:
    """A grammar concerns one generation; what it left in the session is context for the next."""
    model = spelled("byte_level")
    llm = make_llm(model.checkpoint)
    language = LANGUAGES["lark"]
    params = greedy(9, ignore_eos=False, structured_outputs=language.wanted, logit_bias={model.id(b"b"): 3})
    with llm.session(random_tokens(7)) as session:
        for _ in range(3):
            before = session.tokens
            expected, reason = naive(model, before, language, params)
            output = session.generate(params).outputs[0]
            assert (output.token_ids, output.finish_reason) == (expected, reason)
            kept = [token for token in expected if token != model.eos]
            assert session.tokens == before + kept
            free = session.generate(greedy(3)).outputs[0].token_ids
            assert free == model.checkpoint.greedy(before + kept, 3)
        deltas = list(session.stream(params))
        assert "".join(delta.text for delta in deltas).encode().startswith(b"a")
        fork = session.fork()
        assert fork.generate(params).outputs[0].token_ids == session.generate(params).outputs[0].token_ids
        fork.close()
    check(llm)


def test_logprobs_are_of_the_raw_distribution(make_llm: MakeLLM, spelled: Callable[[str], Spelled]) -> None:
    model = spelled("gemma")
    params = greedy(9, logprobs=2, structured_outputs={"choice": ["brown"]})
    prompt = random_tokens(5)
    output = make_llm(model.checkpoint).generate(prompt, params)[0].outputs[0]
    assert output.text == "brown"
    assert output.logprobs is not None
    raw = model.checkpoint.logits(prompt + output.token_ids)[len(prompt) - 1 : -1].log_softmax(-1)
    for row, entries in zip(raw, output.logprobs, strict=True):
        assert set(row.topk(2).indices.tolist()) <= set(entries)


def test_stop_strings_and_the_end_of_the_grammar(make_llm: MakeLLM, spelled: Callable[[str], Spelled]) -> None:
    llm = make_llm(spelled("byte_level").checkpoint)
    params = greedy(20, structured_outputs={"choice": ["the quick brown fox"]})
    whole = llm.generate("x", params)[0].outputs[0]
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("the quick brown fox", "stop", None)
    cut = llm.generate("x", params.replace(stop=" brown"))[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("the quick", "stop", " brown")
    empty = llm.generate("x", greedy(20, structured_outputs={"regex": "a{0}"}))[0].outputs[0]
    assert (empty.text, empty.token_ids, empty.finish_reason) == ("", [], "stop")
    # The last token of a whole text is not one too many.
    short = params.replace(max_tokens=len(whole.token_ids), min_tokens=len(whole.token_ids))
    assert llm.generate("x", short)[0].outputs[0].finish_reason == "stop"
    short = params.replace(max_tokens=len(whole.token_ids) - 1)
    cut = llm.generate("x", short)[0].outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == ("length", None)
    assert whole.text.startswith(cut.text)


def test_a_model_without_eos(make_llm: MakeLLM, tmp_path: Path) -> None:
    """What can be added is added, since nothing could end the text before."""
    model = spell(tmp_path, "byte_level", eos_token_id=None)
    llm = make_llm(model.checkpoint)
    assert not engine_of(llm).eos_ids
    output = llm.generate("x", greedy(20, ignore_eos=False, structured_outputs={"regex": "a{2,7}"}))[0].outputs[0]
    assert (output.text, output.finish_reason) == ("aaaaaaa", "stop")


def test_a_special_token_that_the_grammar_names(make_llm: MakeLLM, spelled: Callable[[str], Spelled]) -> None:
    model = spelled("byte_level")
    llm = make_llm(model.checkpoint)
    params = greedy(9, structured_outputs={"grammar": 'start: <|im_start|> "fox"'}, skip_special_tokens=False)
    output = llm.generate("x", params)[0].outputs[0]
    assert output.text == "<|im_start|>fox"
    assert model.pieces[output.token_ids[0]] == b""
    # Its spelling is not the token.
    params = greedy(30, structured_outputs={"choice": ["<|im_start|>"]})
    assert llm.generate("x", params)[0].outputs[0].text == "<|im_start|>"


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "fox|dog"},
        {"choice": ["fox", "dog"]},
        {"grammar": 'start: "fox" | "dog"'},
        {"json": {"enum": ["fox"]}},
    ],
    ids=lambda form: next(iter(form)),
)
def test_a_form_behind_reasoning(form: dict[str, Any]) -> None:
    """The text is free up to the first mark; without the mark before, the form holds at once."""
    answer = '"fox"' if "json" in form else "fox"

    def fits(text: str, **marks: Any) -> bool:
        data = list(text.encode())
        wanted = StructuredOutputs(**form, **marks)
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar_text(wanted))
        return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())

    thought = "The fox </thin dog\n"
    for text, inside, optional in (
        (answer, False, True),
        (f"{thought}</think>\n\n{answer}", True, False),
        (f"<think>{thought}</think>{answer}", True, True),
        (f"<think></think> {answer}", True, True),
        (f"<think>{thought}", False, False),
        (f"<think>{thought}</think>\n", False, False),
        (f"<think>{thought}</think>cat", False, False),
        (f"<think>a</think>{answer}</think>{answer}", False, False),
    ):
        assert fits(text, reasoning_end="</think>") == inside
        assert fits(text, reasoning_end="</think>", reasoning_begin="<think>") == optional
    given = StructuredOutputs(**form, reasoning_end=3, reasoning_begin="<think>")
    assert StructuredOutputs(**given.given) == given
    assert "<[3]>" in grammar_text(given)


# -- what goes wrong -------------------------------------------------------------------------------

LONE = "\ud800"
CIRCULAR: dict[str, Any] = {}
CIRCULAR["properties"] = CIRCULAR


@pytest.mark.parametrize(
    ("wanted", "match"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, r"exactly one.*regex.*choice"),
        ({"json_object": False}, "exactly one"),
        ({"json_object": 1}, "json_object must be True or False"),
        ({"xml": "a"}, "no field 'xml'.*choice"),
        ("a", "must be StructuredOutputs or a dict"),
        ([], "must be StructuredOutputs or a dict"),
        ({"regex": 5}, "regex must be a non-empty string, got 5"),
        ({"regex": ""}, "regex"),
        ({"grammar": ["a"]}, "grammar"),
        ({"regex": LONE}, "surrogate U\\+D800"),
        ({"choice": []}, "choice"),
        ({"choice": "abc"}, "choice"),
        ({"choice": ["a", ""]}, "structured_outputs.choice.1 must be a non-empty string"),
        ({"choice": [1]}, "choice"),
        ({"json": 5}, "json must be"),
        ({"json": "{"}, "no JSON"),
        ({"regex": "a", "reasoning_end": ""}, "reasoning_end must be a text of 1 to 256 characters, or the id"),
        ({"regex": "a", "reasoning_end": -1}, "reasoning_end must be"),
        ({"regex": "a", "reasoning_end": "b", "reasoning_begin": True}, "reasoning_begin must be"),
        ({"json_object": True, "reasoning_begin": "b"}, "reasoning_begin needs reasoning_end"),
        ({"json": {"a": {1}}}, "no JSON"),
        ({"json": {"a": float("nan")}}, "no JSON"),
        ({"json": CIRCULAR}, "no JSON"),
    ],
)
def test_what_is_no_structured_output(wanted: Any, match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        SamplingParams(structured_outputs=wanted)


@pytest.mark.parametrize(
    ("wanted", "match"),
    [
        ({"regex": "(a"}, r"structured_outputs\.regex '\(a' cannot be compiled: unclosed group$"),
        ({"regex": "[a"}, r"structured_outputs\.regex '\[a' cannot be compiled: unclosed character class$"),
        ({"regex": "a\n/b("}, r"regex 'a\\n/b\(' cannot be compiled: unclosed group$"),
        ({"regex": r"\b"}, r"regex '\\\\b' cannot be compiled: lookarounds not supported"),
        ({"regex": "a(?=b)"}, r"regex 'a\(\?=b\)' cannot be compiled: look-around, including look-ahead"),
        ({"regex": r"[^\d\D]"}, r"regex '\[.*\]' allows no text in the tokens of this model$"),
        ({"json": {"type": "string", "pattern": "[a"}}, r"compiled: pattern '\[a': unclosed character class$"),
        ({"grammar": "start: /[a/"}, r'compiled: at 1\(8\): invalid regex "\[a" .*: unclosed character class$'),
        ({"json": {"type": "foo"}}, r"json cannot be compiled: .*foo"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, r"minimum \(5\) is greater than maximum \(3\)"),
        ({"json": {"not": {}}}, "not"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": {"type": "string", "format": "of my own"}}, "of my own"),
        ({"json": "5"}, "json cannot be compiled"),
        ({"json": "false"}, "schema is false"),
        ({"grammar": "start: word"}, 'unknown name: "word"$'),
        ({"grammar": "start: start"}, "allows no text"),
        ({"grammar": "start: <|nowhere|>"}, "nowhere"),
        ({"grammar": "garbage {{{"}, "grammar cannot be compiled"),
        ({"grammar": "root ::= nowhere"}, "nowhere"),
        ({"grammar": "start: w\nw[temperature=0.5]: /a+/"}, "temperature"),
    ],
)
def test_what_no_grammar_can_hold(
    make_llm: MakeLLM, spelled: Callable[[str], Spelled], wanted: Any, match: str
) -> None:
    llm = make_llm(spelled("byte_level").checkpoint)
    recorder = record(llm)
    params = greedy(3, structured_outputs=wanted)
    with pytest.raises(InvalidArgument, match=match) as raised:
        llm.generate("x", params)
    assert "\n" not in str(raised.value)
    with pytest.raises(InvalidArgument, match="prompt 1: "):
        llm.generate(["x", "y"], [greedy(3), params])
    session = llm.session("x y")
    count = len(recorder.forwards)
    with pytest.raises(InvalidArgument, match=match):
        session.stream(params)
    with pytest.raises(InvalidArgument, match=match):
        session.generate(params)
    session.close()
    assert len(recorder.forwards) == count
    check(llm)


def test_without_a_tokenizer(small: LLM, make_llm: MakeLLM, tmp_path: Path) -> None:
    params = greedy(3, structured_outputs={"regex": "a"})
    with pytest.raises(Unsupported, match="structured_outputs need a tokenizer"):
        small.generate([1, 2], params)
    model = spell(tmp_path, "word_piece")
    with pytest.raises(Unsupported, match="bytes"):
        make_llm(model.checkpoint).generate([1, 2], params)


def test_a_dead_end_ends_one_request(make_llm: MakeLLM, spelled: Callable[[str], Spelled]) -> None:
    """This tokenizer cannot spell everything: that shows late."""
    llm = make_llm(spelled("metaspace").checkpoint)
    with pytest.raises(InvalidArgument, match="allows no text"):
        llm.generate("fox", greedy(5, structured_outputs={"choice": ["€"]}))
    outputs = llm.generate(
        ["fox", "fox", "fox"],
        [greedy(5, structured_outputs={"choice": [choice]}) for choice in ("lazy", "a€", "dog")],
    )
    assert [output.outputs[0].text for output in outputs] == ["lazy", "a", "dog"]
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "error", "stop"]
    assert "no token of the vocabulary continues the text" in (outputs[1].outputs[0].error or "")
    check(llm)


def test_what_cannot_be_spelled_cannot_be_added(make_llm: MakeLLM, spelled: Callable[[str], Spelled]) -> None:
    """The text is whole, more is allowed but cannot be said: EOS ends it, and without EOS it ends
    by itself.
    """
    model = spelled("metaspace")
    llm = make_llm(model.checkpoint)
    params = greedy(9, ignore_eos=False, structured_outputs={"regex": "lazy(€)?"})
    outputs = llm.generate(["fox"] * 3, [params, params.replace(ignore_eos=True), params.replace(min_tokens=9)])
    found = [output.outputs[0] for output in outputs]
    assert [(sample.text, sample.finish_reason) for sample in found] == [("lazy", "stop")] * 3
    assert [sample.stop_reason for sample in found] == [model.eos, None, None]
    assert found[0].token_ids == [*found[1].token_ids, model.eos]
    assert found[1].token_ids == found[2].token_ids
    check(llm)


def test_a_matcher_that_fails_ends_one_request(
    make_llm: MakeLLM, spelled: Callable[[str], Spelled], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(spelled("byte_level").checkpoint)
    accept, calls = GrammarMatcher.accept, itertools.count()

    def failing(self: GrammarMatcher, token: int) -> None:
        if next(calls) == 4:
            raise QuireError("structured_outputs: too complex")
        accept(self, token)

    monkeypatch.setattr(GrammarMatcher, "accept", failing)
    outputs = llm.generate(["a", "b"], greedy(5, n=2, structured_outputs={"regex": "a+"}))
    reasons = [sample.finish_reason for output in outputs for sample in output.outputs]
    assert sorted(reasons) == ["error", "length", "length", "length"]
    check(llm)


def test_grammars_are_compiled_once(
    make_llm: MakeLLM,
    spelled: Callable[[str], Spelled],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    llm = make_llm(spelled("byte_level").checkpoint)
    compiled: list[StructuredOutputs] = []
    compiling = Grammars._compile

    def counting(self: Grammars, wanted: StructuredOutputs) -> Any:
        compiled.append(wanted)
        return compiling(self, wanted)

    monkeypatch.setattr(Grammars, "_compile", counting)
    monkeypatch.setattr("quire.grammars.grammars.MAX_COMPILED", 3)
    schema = {"type": "boolean"}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            llm.generate(["x", "y"], greedy(2, n=2, structured_outputs={"json": schema}))
    assert len(compiled) == 1
    for letter in "abcd":
        llm.generate("x", greedy(2, structured_outputs={"regex": letter}))
    assert len(engine_of(llm).grammars._compiled) == 3  # type: ignore[union-attr]
    llm.generate("x", greedy(2, structured_outputs={"regex": "d"}))
    assert len(compiled) == 5


@pytest.mark.parametrize("threads", [False, True])
def test_masks_of_many_are_those_of_each(spelled: Callable[[str], Spelled], threads: bool) -> None:
    """Words, padding bits included, however many matchers go at a time."""
    model = spelled("byte_level")
    from quire.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(model.checkpoint.path)
    assert tokenizer is not None
    for size in (model.vocab_size, 427, 416, 415):  # ids that the tokenizer has may lie beyond those of the model
        grammars = Grammars(tokenizer, size, threads=threads)
        wanted = [StructuredOutputs(**language.wanted) for language in LANGUAGES.values()]
        many = grammars.allowed(
            {i: grammars.matcher(w) for i, w in enumerate(wanted)}, dict.fromkeys(range(len(wanted)), (3,))
        )
        for i, w in enumerate(wanted):
            (one,) = grammars.allowed({0: grammars.matcher(w)}, {0: (3,)}).values()
            assert np.array_equal(one, many[i])
            assert one.shape == (-(-size // 32),)
            bits = np.unpackbits(one.view(np.uint8), bitorder="little")
            assert not bits[size:].any()
            begins = list(LANGUAGES.values())[i].begins
            assert np.flatnonzero(bits).tolist() == [
                token for token, piece in enumerate(model.pieces[:size]) if piece and token != 3 and begins(piece)
            ]


@pytest.mark.parametrize("spelling", ["byte_level", "gemma"])
def test_what_is_accepted_is_what_masks_allow(spelled: Callable[[str], Spelled], spelling: str) -> None:
    """Token by token, at every point of random texts; only where a text may end the mask knows
    more.
    """
    model = spelled(spelling)
    from quire.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(model.checkpoint.path)
    assert tokenizer is not None
    grammars = Grammars(tokenizer, model.vocab_size, threads=False)
    rng = np.random.default_rng(0)
    for language in LANGUAGES.values():
        matcher = grammars.matcher(StructuredOutputs(**language.wanted))
        for _ in range(30):
            rows = RowGrammars(grammars, {0: matcher}, {0: (3,)})
            asked = [token for token in range(model.vocab_size) if rows.accepts(0, token)]
            bits = np.unpackbits(rows.masks([0])[0].view(np.uint8), bitorder="little")
            assert asked == [token for token in np.flatnonzero(bits).tolist() if token != 3]
            if not asked:
                break
            matcher.accept(int(rng.choice(asked)))


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "choices",
    [
        [f"s{i}" for i in range(3000)],
        [f"item-{i:05}" for i in range(10_000)],
        ["\x7f", "a\x7fb", "\x7f\x7f\x80", "\\\x7f", "\\u007f", "\x00\x1f\x7e\u2028"],
    ],
    ids=["numbers", "items", "signs"],
)
def test_all_choices_can_be_written(spelled: Callable[[str], Spelled], choices: list[str]) -> None:
    """Many that begin alike, and signs that a grammar's strings do not have; masks against a search
    among all.
    """
    model = spelled("byte_level")
    from quire.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(model.checkpoint.path)
    assert tokenizer is not None
    grammars = Grammars(tokenizer, model.vocab_size, threads=False)
    wanted, texts = StructuredOutputs(choice=choices), [choice.encode() for choice in choices]
    rng = np.random.default_rng(0)
    for _ in range(12):
        matcher, text = grammars.matcher(wanted), b""
        for _ in range(30):
            mask = grammars.allowed({0: matcher}, {0: (3,)})[0]
            allowed = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
            rest = [other[len(text) :] for other in texts if other.startswith(text)]
            beginnings = {other[:length] for other in rest for length in range(1, len(other) + 1)}
            expected = {token for token, piece in enumerate(model.pieces) if token != 3 and piece in beginnings}
            assert allowed == expected | ({3} if b"" in rest else set())
            if not expected:
                break
            token = int(rng.choice(sorted(expected)))
            matcher.accept(token)
            text += model.pieces[token]
        assert text in texts
    grammars.close()


def test_a_first_mask_that_is_too_much_is_refused(
    spelled: Callable[[str], Spelled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known when the request is submitted, in the words of the limit."""
    monkeypatch.setattr("quire.grammars.formats.MASK_ITEMS", 5_000)
    model = spelled("byte_level")
    from quire.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(model.checkpoint.path)
    assert tokenizer is not None
    one = {
        f"a{i}": {
            "$ref": f"#/$defs/a{i + 1}",
            "anyOf": [{"properties": {f"x{i}": {"const": j}}} for j in (0, 1)],
        }
        for i in range(8)
    }
    schema = {"$ref": "#/$defs/a0", "$defs": {**one, "a8": {"type": "object"}}}
    with pytest.raises(InvalidArgument, match=r"structured_outputs\.json is too complex to begin a text: .*items"):
        Grammars(tokenizer, model.vocab_size, threads=False).check(StructuredOutputs(json=schema))


def test_an_object_of_many_optional_properties_can_be_written() -> None:
    """With tokens of several letters a mask looks far into all their names."""
    from quire.models.catalogue import resolve_model
    from quire.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(resolve_model("tiny-python"))
    assert tokenizer is not None
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(480)}}
    wanted = StructuredOutputs(json=schema, disable_any_whitespace=False, disable_additional_properties=False)
    grammars = Grammars(tokenizer, tokenizer.token_bytes.size, threads=False)
    matcher = grammars.matcher(wanted)
    for token in tokenizer.encode('{ "p7": "a", "p399": "b"}', add_special_tokens=False):
        assert grammars.allowed({0: matcher}, {0: ()})[0].any(), matcher.reason()
        matcher.accept(token)
    assert matcher.complete
    # Wherever a text goes: white space and parts of names as they come.
    rng = np.random.default_rng(0)
    for _ in range(4):
        matcher = grammars.matcher(wanted)
        for _ in range(12):
            (words_B,) = grammars.allowed({0: matcher}, {0: ()}).values()
            assert matcher.problem() is None
            matcher.accept(int(rng.choice(np.flatnonzero(np.unpackbits(words_B.view(np.uint8), bitorder="little")))))


def test_structured_outputs_is_a_value() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"b": {}, "a": {}}}
    one = StructuredOutputs(json=schema)
    schema["type"] = "array"
    assert one == StructuredOutputs(json={"type": "object", "properties": {"b": {}, "a": {}}})
    assert hash(one) == hash(StructuredOutputs(json='{"type": "object", "properties": {"b": {}, "a": {}}}'))
    assert SamplingParams(structured_outputs={"json": one.json}).structured_outputs == one
    assert StructuredOutputs(choice=["a", "b", "a"]).choice == ("a", "b")
    assert hash(SamplingParams(structured_outputs=one)) == hash(SamplingParams(structured_outputs=one))


def test_on_the_bundled_model(python_llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.8,
        seed=3,
        max_tokens=60,
        structured_outputs={"regex": r"def [a-z_]{3,12}\([a-z]\):\n    return [a-z] \+ [0-9]{1,3}"},
    )
    output = python_llm.generate("# A function.\n", params)[0].outputs[0]
    assert output.finish_reason == "stop"
    names: dict[str, Any] = {}
    exec(output.text, names)  # it is a function
    check(python_llm)
