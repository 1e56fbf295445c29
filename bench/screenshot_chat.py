"""The conversation of screenshots of the chat: what a larger model would answer, as a file that the
page imports."""

from __future__ import annotations

import json
from pathlib import Path

ANSWER = """The **variance** is the mean squared distance from the mean:

$$\\sigma^2 = \\frac{1}{n} \\sum_{i=1}^{n} (x_i - \\mu)^2$$

Welford's method reads each value $x_i$ once, so the values need not be kept:

```python
def variance(values: Iterable[float]) -> float:
    \"\"\"Return the variance of some values, which are read once.\"\"\"
    count, mean, squares = 0, 0.0, 0.0
    for value in values:
        count += 1
        change = value - mean
        mean += change / count
        squares += change * (value - mean)
    return squares / count  # n - 1 for a sample
```

| method | passes | loses digits |
|:--|--:|:--|
| two sums | 1 | if the mean is large |
| Welford | 1 | hardly |
"""
OTHER = "Subtract the mean from each value, square, and take the mean of that. With NumPy: `values.var()`."
QUESTION = "How do I compute a variance in one pass, in Python?"


def conversation(file: Path) -> Path:
    """Write a conversation of two branches to a file; return it."""
    texts = (
        ("00000000000a", None, "user", QUESTION),
        ("00000000000b", "00000000000a", "assistant", OTHER),
        ("00000000000c", "00000000000b", "user", "And without NumPy?"),
        ("00000000000d", "00000000000a", "assistant", ANSWER),
    )
    nodes = {
        name: {"id": name, "parent": parent, "role": role, "content": text, "created": number, "changed": number}
        for number, (name, parent, role, text) in enumerate(texts, start=1)
    }
    head = {"format": 1, "title": "Variance in one pass", "titled": 1, "settled": 1}
    settings = {"sampling": {"max_tokens": 24, "temperature": 0}}
    file.write_text(json.dumps({**head, "settings": settings, "nodes": nodes}))
    return file
