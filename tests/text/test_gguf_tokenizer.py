"""Tokenizers out of GGUF files: byte-level ones against the same vocabulary in tokenizer.json,
SentencePiece's against llama.cpp's algorithm written out, and what else the metadata say.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tests.models.gguf_writer import write_gguf
from tokenizers import Regex, pre_tokenizers

from quire import LLM, SamplingParams
from quire.base.errors import CheckpointError, Unsupported
from quire.kernels.merges import scored_merges
from quire.models.catalogue import resolve_model
from quire.text.gguf_tokenizer import SPLITS, FindMerges, merges_of
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_process import KNOWN, QWEN2

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
PIECES = (
    "def f(x):\n        return x + 1\n",
    "  two  spaces,\ttabs\r\n\r\n and   more   ",
    "你好,世界。今天天气很好。 日本語のテキスト 한국어",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 e\u0301 n\u0303 ก็ naïve café ½ ² Ⅷ",
    "\x00\x01\x1b[0m\x7f\u00a0\u2003\u3000\u2028\ufeff",
    "I'll, you'RE, it's 'S 12345 678.90 -----========####",
    "aaaaaaaaaaa bbbb abababab",
    "<|end|> <|user|><s></s> <tool>x</tool> <0x0A> ▁ ",
)


def lines(count: int) -> list[str]:
    """Pieces of pieces in any order."""
    generator = random.Random(3)

    def one() -> str:
        piece = generator.choice(PIECES)
        start = generator.randrange(len(piece))
        return piece[start : start + generator.randrange(1, 30)]

    return [*PIECES, "", *("".join(one() for _ in range(generator.randrange(1, 6))) for _ in range(count))]


def tokenizer_file(path: Path, **keys: Any) -> Path:
    """A file with these ``tokenizer.`` keys, without tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, keys)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, keys: Mapping[str, Any]) -> None:
    for name, value in keys.items():
        key = f"tokenizer.{name if name.startswith('chat_template') else f'ggml.{name}'}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def bundled_keys(**changes: Any) -> dict[str, Any]:
    """The bundled model's vocabulary, split by Qwen 2's rule."""
    path = resolve_model("tiny-python")
    content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    ids = {**vocabulary, **special}
    tokens = sorted(ids, key=ids.__getitem__)
    assert sorted(ids.values()) == list(range(len(ids)))
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in content["model"]["merges"]]
    return {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": [CONTROL if token in special else NORMAL for token in tokens],
        "merges": merges,
        "eos_token_id": special["<|end|>"],
        "padding_token_id": special["<|pad|>"],
        "chat_template": (path / "chat_template.jinja").read_text(encoding="utf-8"),
        **changes,
    }


def test_byte_level_ids_are_those_of_the_same_tokenizer_json(tmp_path: Path) -> None:
    wanted = tokenizers.Tokenizer.from_file(str(resolve_model("tiny-python") / "tokenizer.json"))
    wanted.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    found = Tokenizer.from_path(tokenizer_file(tmp_path / "x.gguf", **bundled_keys()))
    assert found is not None
    for line in lines(2000):
        ids = found.encode(line)
        assert ids == wanted.encode(line).ids, line
        assert found.decode(ids, skip_special_tokens=False) == wanted.decode(ids, skip_special_tokens=False)
    assert found.special_tokens == {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    assert not found.adds_bos
    assert found.vocab_size == max(wanted.get_vocab(with_added_tokens=True).values()) + 1


def test_the_commonest_rules_need_no_child_process() -> None:
    for name in ("qwen2", "llama-bpe", "gpt-2", "smollm", "gpt-4o"):
        assert set(SPLITS[name].patterns) <= KNOWN, name


# -- SentencePiece ---------------------------------------------------------------------------------


def pieces() -> tuple[list[str], list[float], list[int]]:
    """A vocabulary with scores: bytes, two of the user's, and text with its scores in any order."""
    frequent = sorted({line[i : i + n] for line in PIECES[:7] for i in range(len(line)) for n in (2, 3, 4, 5)})
    random.Random(5).shuffle(frequent)
    known = [one for one in frequent if not set(one) & set("\n你👩ก한🇩\x00")]
    words = [one.replace(" ", "▁") for one in [*sorted(set("".join(known))), *known]]
    tokens = ["<unk>", "<s>", "</s>", "<tool>", "  ", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokens = list(dict.fromkeys(tokens))
    kinds = [UNKNOWN, CONTROL, CONTROL, USER, USER, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 261)]
    scores = [-float(rank) for rank in range(len(tokens) - 261)]
    random.Random(6).shuffle(scores)
    return tokens, [0.0] * 261 + scores, kinds


def spm_ids(text: str, tokens: Sequence[str], scores: Sequence[float], prefix: bool) -> list[int]:
    """llama.cpp's ids of a text without control tokens and the user's."""
    ids = {token: number for number, token in enumerate(tokens)}
    text = (f" {text}" if prefix and text else text).replace(" ", "▁")
    parts = list(text)
    while True:
        unions = [(-scores[ids[one]], at) for at in range(len(parts) - 1) if (one := parts[at] + parts[at + 1]) in ids]
        if not unions:
            break
        _, at = min(unions)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


@pytest.mark.parametrize("find_merges", [merges_of, scored_merges()])
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_are_those_of_its_algorithm(tmp_path: Path, prefix: bool, find_merges: FindMerges) -> None:
    tokens, scores, kinds = pieces()
    keys = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds, "add_space_prefix": prefix}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_eos_token": True}
    found = Tokenizer.from_path(tokenizer_file(tmp_path / "x.gguf", **keys, **ids), find_merges)
    assert found is not None
    for line in lines(1000):
        plain = line.replace("<tool>", "").replace("<s>", "").replace("</s>", "")
        while "  " in plain:
            plain = plain.replace("  ", " ")
        got = found.encode(plain)
        assert got == [1, *spm_ids(plain, tokens, scores, prefix), 2], plain
        assert found.decode(got) == plain.replace("▁", " "), plain
    space = spm_ids("", tokens, scores, prefix)
    assert space == []
    split = spm_ids("a", tokens, scores, prefix)
    assert found.encode("a<tool>a  a", add_special_tokens=False) == [*split, 3, *split, 4, *split]
    assert found.encode("a</s>a", add_special_tokens=False) == [*split, 2, *split]


def test_the_first_of_equal_tokens_counts(tmp_path: Path) -> None:
    tokens, scores, kinds = pieces()
    tokens, scores, kinds = [*tokens, tokens[300]], [*scores, 1.0], [*kinds, NORMAL]
    keys = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds, "add_space_prefix": False}
    found = Tokenizer.from_path(tokenizer_file(tmp_path / "x.gguf", **keys))
    assert found is not None
    assert found.token_id(tokens[300]) == 300


# -- what else the metadata say --------------------------------------------------------------------


def test_ends_and_templates(tmp_path: Path) -> None:
    keys = bundled_keys()
    tokens, kinds = list(keys["tokens"]), list(keys["token_type"])
    for token, kind in (("<|im_end|>", CONTROL), ("<tool call>", USER), ("<end_of_turn>", NORMAL)):
        tokens.append(token)
        kinds.append(kind)
    size = len(tokens)
    named = {"chat_templates": ["tool_use"], "chat_template.tool_use": "T", "eot_token_id": 2, "add_bos_token": True}
    file = tokenizer_file(
        tmp_path / "x.gguf", **{**keys, **named, "tokens": tokens, "token_type": kinds, "bos_token_id": 3}
    )
    found = Tokenizer.from_path(file)
    assert found is not None
    assert found.eos_ids == (0, 2, size - 3)
    assert found.bos_id == 3
    assert found.encode("x")[0] == 3
    assert set(found.chat_templates) == {"default", "tool_use"}
    assert found.encode("a<tool call>b", add_special_tokens=False)[1] == size - 2
    assert found.decode([size - 2, size - 3]) == "<tool call>"
    assert found.vocab_size == size


def test_what_is_unknown_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"tokenizer.ggml.pre is 'klingon', a rule that is not known.*llama-bpe"):
        Tokenizer.from_path(tokenizer_file(tmp_path / "a.gguf", **bundled_keys(pre="klingon")))
    with pytest.raises(Unsupported, match=r"tokenizer.ggml.model is 'bert'"):
        Tokenizer.from_path(tokenizer_file(tmp_path / "b.gguf", **bundled_keys(model="bert")))
    assert Tokenizer.from_path(tokenizer_file(tmp_path / "c.gguf", model="none")) is None
    for changes, message in (
        ({"token_type": [1, 2]}, "token_type is an array of 2"),
        ({"tokens": []}, "tokens is"),
        ({"merges": ["ab"]}, "'ab' in tokenizer.ggml.merges"),
        ({"merges": ["a xyzzy-is-none"]}, "its tokens and merges make no tokenizer"),
        ({"eos_token_id": 1 << 20}, "eos_token_id is 1048576; expected an id below"),
        ({"model": "llama"}, "scores is missing"),
        ({"model": "llama", "scores": [math.nan] * len(bundled_keys()["tokens"])}, "one is NaN"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.from_path(tokenizer_file(tmp_path / "d.gguf", **bundled_keys(**changes)))


def test_a_file_chats(tmp_path: Path) -> None:
    """The bundled model as one file: its text, its template, its end."""
    file = write_gguf(
        resolve_model("tiny-python"),
        tmp_path / "tiny.gguf",
        vocabulary=lambda writer: add_tokenizer(writer, bundled_keys()),
    )
    messages = [{"role": "user", "content": "add two numbers"}]
    params = SamplingParams(max_tokens=24, temperature=0)
    with LLM(str(file), kv_cache_memory="16MiB", max_model_len=128) as llm:
        found = llm.chat(messages, params)[0].outputs[0]
        prompt = llm.chat(messages, params)[0].prompt_token_ids
    with LLM("tiny-python", kv_cache_memory="16MiB", max_model_len=128) as llm:
        wanted = llm.generate([list(prompt)], params)[0].outputs[0]
    assert list(found.token_ids) == list(wanted.token_ids)
    assert found.text == wanted.text
