"""Real models in GGUF files, with the same models beside them as directories: `make test-real
DIR=...`, where DIR holds ``NAME.gguf`` and ``NAME/``, which transformers has written.

Nothing runs without ``QUIRE_REAL_MODELS``, the name of that directory.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import safe_open

from quire import LLM, SamplingParams
from quire.models.sources import open_weights
from quire.text.tokenizer import Tokenizer
from quire.weights.gguf_blocks import BLOCKS

FOLDER = os.environ.get("QUIRE_REAL_MODELS", "")
FILES = sorted(one for one in Path(FOLDER).glob("*.gguf") if one.with_suffix("").is_dir()) if FOLDER else []
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FILES, reason="QUIRE_REAL_MODELS names no directory with NAME.gguf and NAME/"),
    pytest.mark.timeout(3000),
]

LINES = 20_000
TOKENS = 200
PROMPTS = ("def fibonacci(n):\n", "The capital of France is")
SCRIPTS = (
    "".join(map(chr, range(0x4E00, 0x9FFF, 7))),
    "".join(map(chr, range(0x3040, 0x30FF))),
    "".join(map(chr, range(0xAC00, 0xD7A3, 11))),
    "".join(map(chr, range(0x1F300, 0x1F6FF))) + "\u200d\ufe0f",
    "".join(map(chr, range(0x400, 0x4FF))),
    "".join(map(chr, range(0x600, 0x6FF))),
    "".join(map(chr, range(0x900, 0x97F))),
    "".join(map(chr, range(32))),
    "\u00a0\u2003\u3000\t\n\r\v\f  \u2028\u0085\ufeff",
    "abc DEF'ghi's 'LL 'Re I'd 12345 678 9",
    "éàüñ e\u0301 a\u030a ſ İ ß ½ ² Ⅷ ١٢٣",
    ".,;:!?-_=+*/\\|<>()[]{}@#$%^&~`\"'",
    "▁<0x0A><s></s><unk> <|im_start|> <tool_call><eos><bos><unused3>",
)


@pytest.fixture(params=FILES or [Path("none.gguf")], ids=lambda path: path.stem)
def file(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def lines() -> Iterator[str]:
    """Code, prose, and mixtures of scripts, symbols, control characters and white space."""
    root, generator = Path(__file__).parents[1], random.Random(1)
    found = [
        line
        for path in sorted([*root.glob("src/**/*.py"), *root.glob("docs/*.md"), *root.glob("src/**/*.cpp")])
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    yield from generator.sample(found, min(len(found), LINES // 2))
    for _ in range(LINES - min(len(found), LINES // 2)):
        runs = generator.choices(SCRIPTS, k=generator.randrange(1, 5))
        parts = ["".join(generator.choices(run, k=generator.randrange(1, 25))) for run in runs]
        yield "".join(part + generator.choice(("", " ", "  ", "\n", "   ")) for part in parts)


def test_ids_of_mixed_text(file: Path) -> None:
    """Those of tokenizer.json, except for runs of 32 spaces and more and a written ▁: there
    SentencePiece, as llama.cpp, takes the longest token of spaces first, and a ▁ for itself.
    """
    found = Tokenizer.from_path(file)
    assert found is not None
    wanted = tokenizers.Tokenizer.from_file(str(file.with_suffix("") / "tokenizer.json"))
    # One of the normaliser's; byte-level tokenizers have none.
    excepted = ("▁", " " * 32) if wanted.normalizer is not None else ()
    texts = [line for line in lines() if not any(one in line for one in excepted)]
    assert len(texts) > LINES // 2
    for text, mine, theirs in zip(
        texts, found.backend.encode_batch_fast(texts), wanted.encode_batch_fast(texts), strict=True
    ):
        assert mine.ids == theirs.ids, text
        assert found.decode(mine.ids) == wanted.decode(mine.ids), text


def test_weights_in_bfloat16_are_those_of_the_directory(file: Path) -> None:
    source = open_weights(file)
    with safe_open(file.with_suffix("") / "model.safetensors", framework="pt") as stored:
        names = set(stored.keys())
        assert names - set(source.tensors) <= {"lm_head.weight"}
        for name in sorted(names & set(source.tensors)):
            form, out = source.format(name, None), torch.empty(source.tensors[name].shape, dtype=torch.bfloat16)
            form.expand(name, {name: source.read(name)}, out)
            assert torch.equal(out, stored.get_tensor(name)), name


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_of_transformers(file: Path, prompt: str) -> None:
    """Which reads the same file, in float32."""
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    with LLM(str(file), dtype="float32", kv_cache_memory="256MiB", max_model_len=1024) as llm:
        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        output = llm.generate([prompt], params)[0]
        assert set(llm.status()["weight_formats"]) & set(BLOCKS)
    ids = torch.tensor([output.prompt_token_ids])
    wanted = theirs.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
    assert list(output.outputs[0].token_ids) == wanted.tolist()
