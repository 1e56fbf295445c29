"""Texts that try tokenizers: code and prose of this repository, and mixtures of scripts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

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


def mixed_lines(count: int) -> Iterator[str]:
    """Yield ``count`` texts: half of them lines of code and prose, the others mixtures of scripts,
    symbols, control characters and white space.
    """
    generator = random.Random(1)
    found = [
        line
        for path in sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/**/*.cpp")])
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    plain = generator.sample(found, min(len(found), count // 2))
    yield from plain
    for _ in range(count - len(plain)):
        runs = generator.choices(SCRIPTS, k=generator.randrange(1, 5))
        parts = ["".join(generator.choices(run, k=generator.randrange(1, 25))) for run in runs]
        yield "".join(part + generator.choice(("", " ", "  ", "\n", "   ")) for part in parts)
