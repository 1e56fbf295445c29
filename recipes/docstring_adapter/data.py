"""Functions that have a docstring, out of Python sources, and training sequences made of them.

A training text is the head of a function, a docstring of one line (the summary of the one that its
author wrote) and the first lines of the body. All sequences have one length: texts are strung
together, half of the time with blank lines between them as in one module, else with the token that
ends documents.

Letters: T tokens of a sequence.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from recipes.tiny_python.corpus import Document
from recipes.tiny_python.vocabulary import END_ID
from tokenizers import Tokenizer
from torch import Tensor

IGNORED = -100
"""The label of a token that is not learned; the loss of torch and transformers knows it."""

SHORTEST, LONGEST = 12, 76
"""Characters of a docstring's summary that is used."""

BODY_TOKENS = 40
"""The body is cut at the last line end before so many tokens."""

_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function as text: ``head`` ends with its colon, ``indent`` are the spaces before its
    docstring.
    """

    head: str
    """From ``def`` on; of a method with the line of its class before it."""
    indent: str
    summary: str
    """The first sentence or line of the docstring, without quotes."""
    body: str
    """The lines behind the docstring; each ends with a newline. May be empty."""

    @property
    def docstring(self) -> str:
        """The docstring of one line, as it stands in a file: with its indentation, without the
        newline.
        """
        return f'{self.indent}"""{self.summary}"""'


def functions_of(documents: Iterable[Document]) -> list[Function]:
    """The functions and methods whose docstring has a usable summary, each head once, in the order
    of the documents.
    """
    found: dict[str, Function] = {}
    for document in documents:
        for function in _functions_of_module(document.text):
            found.setdefault(function.head, function)
    return list(found.values())


def summary_of(docstring: str) -> str | None:
    """The first paragraph of a docstring if it is a plain short line with a full stop."""
    paragraph = docstring.strip().partition("\n\n")[0]
    line = " ".join(paragraph.split())
    if not SHORTEST <= len(line) <= LONGEST or not line[0].isupper() or re.search(r'["\\`<>|{}:*]', line):
        return None
    return line if line.endswith((".", "!", "?")) else f"{line}."


def _functions_of_module(text: str) -> Iterator[Function]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Invalid escapes of other people's strings.
            module = ast.parse(text)
    except (SyntaxError, ValueError):
        return  # The standard library holds files that are broken on purpose.
    lines = text.split("\n")
    for node in module.body:
        if isinstance(node, _FUNCTION):
            yield from _function(node, "", lines)
        elif isinstance(node, ast.ClassDef):
            title = lines[node.lineno - 1]
            if title.endswith(":"):
                for inner in node.body:
                    if isinstance(inner, _FUNCTION):
                        yield from _function(inner, f"{title}\n", lines)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, before: str, lines: Sequence[str]) -> Iterator[Function]:
    """The function, if it has a summary and is written as most are: four spaces a level, the
    docstring below the head.
    """
    docstring = ast.get_docstring(node)
    summary = summary_of(docstring) if docstring else None
    if summary is None or node.end_lineno is None:
        return
    first = node.body[0]
    assert first.end_lineno is not None
    head = before + "\n".join(lines[node.lineno - 1 : first.lineno - 1])
    indent = " " * (8 if before else 4)
    if not head.endswith(":") or not lines[first.lineno - 1].startswith((indent + '"', indent + "'", indent + "r")):
        return
    body = lines[first.end_lineno : node.end_lineno]
    yield Function(head=head, indent=indent, summary=summary, body="".join(f"{line}\n" for line in body))


@dataclass(frozen=True, kw_only=True)
class Example:
    """A function as tokens; the first ``given`` are its head, which is not learned."""

    ids: tuple[int, ...]
    given: int
    docstring: int
    """Tokens of the docstring, which follow the head; the body follows them."""


def example(function: Function, tokenizer: Tokenizer, *, split: bool) -> Example:
    """The tokens of a function.

    The tokenizer makes one token of a newline and the indentation behind it. A prompt may end
    behind the newline, so that the indentation is for the model to write: with ``split`` the text
    is tokenized as such a prompt and what comes after it.
    """
    if split:
        head = tokenizer.encode(f"{function.head}\n").ids
        docstring = tokenizer.encode(function.docstring).ids
    else:
        head = tokenizer.encode(function.head).ids
        docstring = tokenizer.encode(f"\n{function.docstring}").ids
    body: list[int] = []
    for line in function.body.splitlines():
        more = tokenizer.encode(f"\n{line}").ids
        if len(body) + len(more) > BODY_TOKENS:
            break
        body += more
    return Example(ids=(*head, *docstring, *body), given=len(head), docstring=len(docstring))


def sequences(
    functions: Sequence[Function], tokenizer: Tokenizer, *, length: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless ``(ids_T, labels_T)`` of ``length`` tokens, int64; the order depends on the seed
    alone.

    Each function comes once an epoch, tokenized in either way by chance. Labels are the ids, with
    :data:`IGNORED` at heads and at what stands between functions. A function that does not fit into
    what is left of a sequence fills it with its beginning and stands whole at the start of the next
    one; one that is longer than a sequence is left out.

    ``functions`` must hold one that fits; otherwise ``ValueError``.
    """
    between = tokenizer.encode("\n\n\n").ids
    ids: list[int] = []
    labels: list[int] = []
    for epoch in itertools.count():
        rng = random.Random(f"{seed}/{epoch}")
        order = list(functions)
        rng.shuffle(order)
        used = 0
        for function in order:
            one = example(function, tokenizer, split=rng.random() < 0.5)
            if len(one.ids) > length:
                continue
            used += 1
            if ids:
                gap = between if rng.random() < 0.5 else [END_ID]
                ids += gap
                labels += [IGNORED] * len(gap)
            ids += one.ids
            labels += [IGNORED] * one.given + list(one.ids[one.given :])
            if len(ids) >= length:
                yield torch.tensor(ids[:length]), torch.tensor(labels[:length])
                whole = len(ids) == length
                ids, labels = ([], []) if whole else (list(one.ids), [IGNORED] * one.given + list(one.ids[one.given :]))
        if not used:
            raise ValueError(f"none of {len(functions)} functions fits into {length} tokens")
