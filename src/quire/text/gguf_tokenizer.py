"""The tokenizer that a GGUF file's metadata describe, as one of the ``tokenizers`` library.

Ids are those of llama.cpp. Two kinds are read: byte-level BPE (``gpt2``), whose text is split by
the rule that ``tokenizer.ggml.pre`` names, and SentencePiece's BPE (``llama``), which merges the
neighbours whose union has the best score. Others are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from quire.base.collector import paused_collector
from quire.base.errors import CheckpointError, Unsupported
from quire.text.tokenizer_process import ENDS, GPT2, LLAMA3, LOWER, O200K, QWEN2, TAIL, UPPER, WORD
from quire.weights.gguf_container import GgufFile, opened
from quire.weights.gguf_paths import part_files

CONTROL, USER_DEFINED, UNUSED, BYTE = 3, 4, 5, 6
"""Types of tokens, of which the others are text."""
SPACE = "▁"
"""SentencePiece's spelling of a space."""

QWEN35 = rf"{ENDS}|{WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{TAIL}"
TEKKEN = rf"{WORD}{UPPER}*{LOWER}+|{WORD}{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}"
DEEPSEEK3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)

DEEPSEEK_WORDS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-"
    r"ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ"
    r"-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
DEEPSEEK_SIGNS = r"\s?[!-/:-~！-／：-～‘-‟　-。]+"


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """A rule that splits text before byte-level BPE."""

    patterns: tuple[str, ...]
    """Each splits what the ones before it have left."""
    whole: bool = False
    """Whether a piece that is a token is not merged from bytes."""
    begins: bool = False
    """Whether texts begin with BOS, unless the file says otherwise."""


_DIGITS = Split(patterns=(r"\p{N}", GPT2))
_DEEPSEEK3 = Split(patterns=(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3))
SPLITS: Mapping[str, Split] = {
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"),
            *("gigachat", "a.x-4.0", "mellum", "modern-bert", "exaone4", "granite-docling"),
        ),
        Split(patterns=(GPT2,)),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        Split(patterns=(LLAMA3,), whole=True, begins=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Split(patterns=(LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), Split(patterns=(LLAMA3,), whole=True)),
    **dict.fromkeys(
        ("qwen2", "stablelm2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "hunyuan", "solar-open", "grok-2"),
        Split(patterns=(QWEN2,)),
    ),
    "qwen35": Split(patterns=(QWEN35,)),
    "tekken": Split(patterns=(TEKKEN,), whole=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), Split(patterns=(O200K,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "deepseek-coder": Split(patterns=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-llm": Split(patterns=("[\r\n]", DEEPSEEK_WORDS, DEEPSEEK_SIGNS, r"\s+$", "[一-龥ࠀ-一가-퟿]+", r"\p{N}+")),
    "falcon": Split(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
}
"""The rules by the values of ``tokenizer.ggml.pre``."""

TURN_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<EOT>",
)
"""Control tokens that end a text or a turn, also in files that do not name them so."""
NAMED: Mapping[str, str] = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "mask_token": "mask",
}
"""Special tokens, with their names in ``tokenizer.ggml.NAME_token_id``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTokenizer:
    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    eos_ids: Sequence[int]
    chat_templates: Mapping[str, str]
    size: int
    """The highest id plus one."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The arrays of tokens in a file, checked."""

    file: GgufFile
    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.types) not in (0, len(self.tokens)):
            raise self.file.error("tokenizer.ggml.token_type", f"a type for each of {len(self.tokens)} tokens")
        ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if len(ids) < len(self.tokens):  # the first of equal ones counts
            ids = {token: number for number, token in reversed([*enumerate(self.tokens)])}
        object.__setattr__(self, "ids", ids)

    def numbers(self, *types: int, others: bool = False) -> list[int]:
        """Return the numbers of the tokens of these types, or of all ``others``."""
        found: list[int] = np.flatnonzero(np.isin(np.array(self.types), types, invert=others)).tolist()
        return found

    def of(self, *types: int) -> list[str]:
        return [self.tokens[number] for number in self.numbers(*types)]

    def special(self, name: str) -> int | None:
        """Return the id of ``tokenizer.ggml.NAME_token_id``; None without it."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.file:
            return None
        found = self.file.whole(key)
        if found >= len(self.tokens):
            raise self.file.error(key, f"an id below {len(self.tokens)}")
        return found


Merges: TypeAlias = list[tuple[str, str]]
FindMerges: TypeAlias = Callable[[Sequence[str], Sequence[float], Sequence[int]], Merges]
"""``merges_of``, or a function that leaves out merges which no text uses."""


def merges_of(tokens: Sequence[str], scores: Sequence[float], joined: Sequence[int]) -> Merges:
    """Return all pairs of tokens whose union is one of the tokens with numbers ``joined``, the best
    score of a union first, then in the order of ``joined`` and of the cuts. A vocabulary of 262,144
    tokens has half a million."""
    known, found = frozenset(tokens), []
    for number in joined:
        token = tokens[number]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                found.append((-scores[number], left, right))
    found.sort(key=itemgetter(0))
    return [(left, right) for _, left, right in found]


def read_gguf_tokenizer(path: Path, find_merges: FindMerges = merges_of) -> GgufTokenizer | None:
    """Return the tokenizer of a GGUF file, of a split one its first part; None: the file has none.
    ``Unsupported`` for another kind or rule, by name, ``CheckpointError`` for damaged arrays."""
    file = opened(part_files(path)[0])
    kind = file.text("tokenizer.ggml.model", "none")
    if kind == "none":
        return None
    if kind not in ("gpt2", "llama"):
        raise Unsupported(
            f"{path}: tokenizer.ggml.model is {kind!r}, which is not supported; expected 'gpt2' or 'llama'"
        )
    tokens = file.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise file.error("tokenizer.ggml.tokens", "an array of texts")
    vocabulary = _Vocabulary(file, tokens, file.numbers("tokenizer.ggml.token_type"))
    try:
        with paused_collector():
            backend = _byte_level(vocabulary) if kind == "gpt2" else _sentencepiece(vocabulary, find_merges)
        _add_tokens(backend, vocabulary)
        _frame(backend, vocabulary, begins=kind == "llama" or (kind == "gpt2" and _split_of(file).begins))
    except (Unsupported, CheckpointError, MemoryError):
        raise
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: its tokens and merges make no tokenizer: {error}") from error
    special = {name: vocabulary.special(theirs) for name, theirs in NAMED.items()}
    ends = [vocabulary.special(name) for name in ("eos", "eot", "eom")]
    control = set(vocabulary.of(CONTROL))
    ends += [vocabulary.ids[token] for token in TURN_ENDS if token in control]
    return GgufTokenizer(
        backend=backend,
        special_tokens={name: tokens[one] for name, one in special.items() if one is not None},
        eos_ids=tuple(dict.fromkeys(one for one in ends if one is not None)),
        chat_templates=_chat_templates(file),
        size=max(vocabulary.ids.values()) + 1,
    )


def _split_of(file: GgufFile) -> Split:
    name = file.text("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise Unsupported(
            f"{file.path}: tokenizer.ggml.pre is {name!r}, a rule that is not known, so texts would get other tokens; known "
            f"ones: {', '.join(sorted(SPLITS))}; give tokenizer= with a directory that holds the model's tokenizer.json"
        )
    return SPLITS[name]


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    file, split = vocabulary.file, _split_of(vocabulary.file)
    texts = file.texts("tokenizer.ggml.merges")
    if (wrong := next((text for text in texts if " " not in text), None)) is not None:
        raise CheckpointError(f"{file.path}: {wrong!r} in tokenizer.ggml.merges; expected two tokens and a space")
    halves = " ".join(texts).split(" ")
    merges: list[Any] = list(zip(halves[::2], halves[1::2], strict=False))
    if len(halves) != 2 * len(texts):  # one has several spaces
        merges = [tuple(text.split(" ", 1)) for text in texts]
    backend = tokenizers.Tokenizer(models.BPE(dict(vocabulary.ids), merges, ignore_merges=split.whole))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary, find_merges: FindMerges) -> tokenizers.Tokenizer:
    file = vocabulary.file
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens) or not vocabulary.types:
        raise file.error(
            "tokenizer.ggml.scores", f"a score for each of {len(vocabulary.tokens)} tokens, and their types"
        )
    if any(map(math.isnan, scores)):
        raise file.error("tokenizer.ggml.scores", "scores that are numbers; one is NaN")
    joined = vocabulary.numbers(CONTROL, USER_DEFINED, UNUSED, BYTE, others=True)
    unknown = vocabulary.special("unknown")
    backend = tokenizers.Tokenizer(
        models.BPE(
            dict(vocabulary.ids),
            find_merges(vocabulary.tokens, scores, joined),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces, prefixed = normalizers.Replace(" ", SPACE), file.flag("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Add control tokens as special ones and the user's as others: both stand in texts as they
    are. Phi-3's control tokens take up the white space behind them, as in llama.cpp."""
    name = vocabulary.file.text("general.name", "").lower()
    strips = vocabulary.file.architecture == "phi3" and ("phi-3" in name or "phi3" in name)
    kept = ("<unk>", "<s>", "<|endoftext|>")
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True, rstrip=strips and token not in kept)
            for token in vocabulary.of(CONTROL)
        ]
    )
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in vocabulary.of(USER_DEFINED)])


def _frame(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, *, begins: bool) -> None:
    """Put BOS before texts and EOS behind them, if the file wants that."""
    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    first = vocabulary.file.flag("tokenizer.ggml.add_bos_token", begins) and bos is not None
    last = vocabulary.file.flag("tokenizer.ggml.add_eos_token", False) and eos is not None
    special = [(vocabulary.tokens[one], one) for one, used in ((bos, first), (eos, last)) if one is not None and used]
    if special:
        before, behind = ([special[0][0]] if first else []), ([special[-1][0]] if last else [])
        backend.post_processor = processors.TemplateProcessing([*before, "$A", *behind], None, special)


def _chat_templates(file: GgufFile) -> dict[str, str]:
    key, found = "tokenizer.chat_template", dict[str, str]()
    if key in file:
        found["default"] = file.text(key)
    for name in file.texts("tokenizer.chat_templates"):
        found[name] = file.text(f"{key}.{name}")
    return found
