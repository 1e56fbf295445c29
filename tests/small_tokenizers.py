"""Small tokenizers of every kind of decoder, trained on a few lines of difficult text."""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "你好,世界。今天天气很好。 日本語のテキスト 한국어",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 e\u0301 n\u0303 ก็ a\u0308\u0323 naïve café",
    "  two  spaces,\ttabs\r\n\r\n and   more ",
] * 3
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def _trained(pre_tokenizer: pre_tokenizers.PreTokenizer, alphabet: list[str]) -> models.BPE:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(
        LINES,
        trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False),
    )
    return tokenizer.model


def add_bos(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3, Qwen: every token is a run of bytes; no BOS."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(_trained(pre_tokenizer, pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("→ä", special=False)])
    return tokenizer


def sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 2: ▁ for spaces, bytes for unknown characters, a space before the text, BOS."""
    trained = tokenizers.Tokenizer(_trained(pre_tokenizers.Metaspace(), []))
    state = trained.get_vocab()
    rare = set("你👩ก한🇩")  # only to be had as bytes
    kept = [token for token in sorted(state, key=state.__getitem__) if not rare & set(token) and token not in SPECIAL]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *kept]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = []
    for left in kept:  # every way to make a token out of two others, shortest first
        merges += [(left, right) for right in kept if left + right in vocabulary]
    merges.sort(key=lambda merge: vocabulary[merge[0] + merge[1]])
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    add_bos(tokenizer)
    return tokenizer


def gemma() -> tokenizers.Tokenizer:
    """Like ``sentencepiece`` without a space before the text."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """As T5: ▁ for spaces, no bytes; EOS after the text."""
    tokenizer = tokenizers.Tokenizer(_trained(pre_tokenizers.Metaspace(), []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """As BERT: what a token adds depends on the one before."""
    words = [
        *SPECIAL,
        *"abcdefghijklmnopqrstuvwxyz.,!'",
        *("##" + c for c in "abcdefghijklmnopqrstuvwxyz"),
        "the",
        "##ing",
    ]
    model = models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def word_level() -> tokenizers.Tokenizer:
    """No decoder at all: tokens are joined with spaces."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate([*SPECIAL, "a", "b", "c"])}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def end_of_word() -> tokenizers.Tokenizer:
    """As GPT-1: a space belongs to the token before it, unless that is the last one."""
    tokens = [*SPECIAL, *"abcdef", *(letter + "</w>" for letter in "abcdef")]
    model = models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", end_of_word_suffix="</w>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


_ALL = (byte_level, sentencepiece, gemma, metaspace, word_piece, word_level, end_of_word)
BUILDERS = {builder.__name__: builder for builder in _ALL}


@cache
def saved(kind: str) -> str:
    """The tokenizer.json of one kind."""
    return BUILDERS[kind]().to_str()
