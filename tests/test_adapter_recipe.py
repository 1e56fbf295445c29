"""The recipe of the bundled adapter in miniature, and the adapter that is shipped."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer

from quire.base.errors import InvalidArgument

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.docstring_adapter import evaluation, train
from recipes.docstring_adapter.data import IGNORED, Function, example, functions_of, sequences, summary_of
from recipes.docstring_adapter.train import PROJECTIONS, Settings, collect_functions, learning_rate_scale
from recipes.tiny_python import corpus
from recipes.tiny_python.corpus import Document
from recipes.tiny_python.vocabulary import END_ID

DATA = Path(__file__).resolve().parents[1] / "src/quire/data"
BASE, SHIPPED = DATA / "tiny-python", DATA / "tiny-python-docstrings"
FILES = {"adapter_config.json", "adapter_model.safetensors", "README.md"}

MODULE = '''\
"""Of no interest."""

def area(width, height):
    """Return the area.

    More is cut off.
    """
    # kept
    return width * height

def undocumented():
    return 1

def terse(): """Not below its head."""

class Stack(list):
    """A class."""

    @property
    async def top(
        self,
    ):
        \'\'\'The last
        item\'\'\'

    def __len__(self):
        """`len(self)`, which is no plain sentence."""
'''

HEADS = (
    "def area(width, height):",
    "def count_words(text):",
    "def load_settings(path):",
    "def is_palindrome(word):",
    "def merge_sorted(left, right):",
    "def send_message(socket, message, timeout=None):",
    "def normalize_vector(vector):",
    "def find_longest_line(lines):",
    "class Stack:\n    def push(self, item):",
    "class Account:\n    def withdraw(self, amount):",
    "class Robot:\n    def turn_left(self):",
    "class LruCache(dict):\n    def evict_oldest(self):",
)
"""Heads that are in no file of the training text."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BASE / "tokenizer.json"))


@pytest.fixture(scope="module")
def functions() -> list[Function]:
    return functions_of([Document(path="m.py", text=MODULE)])


class TestFunctions:
    def test_found(self, functions: list[Function]) -> None:
        area, top = functions
        assert area.head == "def area(width, height):"
        assert area.docstring == '    """Return the area."""'
        assert area.body == "    # kept\n    return width * height\n"
        assert top.head == "class Stack(list):\n    async def top(\n        self,\n    ):"
        assert top.docstring == '        """The last item."""'
        assert top.body == ""

    def test_each_head_once_and_broken_files_skipped(self, functions: list[Function]) -> None:
        texts = (MODULE, "def broken(:\n", MODULE, "x = '\0'\n")
        assert functions_of([Document(path=f"{i}.py", text=text) for i, text in enumerate(texts)]) == functions

    @pytest.mark.parametrize(
        ("docstring", "summary"),
        [
            ("Return the sum", "Return the sum."),
            ("  Return\n    the sum!\n\nNotes.", "Return the sum!"),
            ("Too short", None),
            ("lower case is often no sentence.", None),
            ("Return `the` sum of them.", None),
            ("Return the sum\n:param x: of them", None),
            ('Return the "sum" of them.', None),
            ("Return " + "a long " * 12 + "sum.", None),
        ],
    )
    def test_summary(self, docstring: str, summary: str | None) -> None:
        assert summary_of(docstring) == summary


class TestCollection:
    def test_held_out_heads_are_not_trained_on(
        self, monkeypatch: pytest.MonkeyPatch, functions: list[Function]
    ) -> None:
        """The same function may stand in two files, one on each side of the split."""
        other = MODULE.replace("def area", "def other")
        texts = {"train": [MODULE, other], "heldout": [MODULE]}
        monkeypatch.setattr(corpus, "collect", lambda *_: [])
        monkeypatch.setattr(
            corpus,
            "read_documents",
            lambda path: [Document(path="m.py", text=t) for t in texts[path.name.split(".")[1]]],
        )
        trained_on, heldout, _ = collect_functions(Settings())
        assert heldout == functions
        assert [function.head for function in trained_on] == ["def other(width, height):"]
        assert collect_functions(Settings(evaluated=1))[1] == functions[:1]


class TestTokens:
    @pytest.mark.parametrize("split", [False, True])
    def test_a_text_in_three_parts(self, tokenizer: Tokenizer, functions: list[Function], split: bool) -> None:
        function = functions[0]
        one = example(function, tokenizer, split=split)
        end = one.given + one.docstring
        given, docstring, body = one.ids[: one.given], one.ids[one.given : end], one.ids[end:]
        newline = ("\n", "") if split else ("", "\n")
        assert tokenizer.decode(list(given)) == function.head + newline[0]
        assert tokenizer.decode(list(docstring)) == newline[1] + function.docstring
        assert tokenizer.decode(list(body)) == "\n" + function.body.rstrip("\n")

    def test_given_tokens_are_those_of_the_prompt(self, tokenizer: Tokenizer, functions: list[Function]) -> None:
        """What is learned must be what the model meets when the text up to there is the prompt."""
        for function in functions:
            joined, split = (example(function, tokenizer, split=way) for way in (False, True))
            assert tokenizer.encode(f"{function.head}\n{function.indent}").ids == list(joined.ids[: joined.given + 1])
            assert tokenizer.encode(f"{function.head}\n").ids == list(split.ids[: split.given])
            whole = f"{function.head}\n{function.docstring}\n{function.body}".rstrip("\n")
            assert tokenizer.encode(whole).ids == list(joined.ids)

    def test_long_body_is_cut_at_a_line(self, tokenizer: Tokenizer, functions: list[Function]) -> None:
        lines = [f"    item_{i} = read(stream, {i})\n" for i in range(30)]
        one = example(dataclasses.replace(functions[0], body="".join(lines)), tokenizer, split=False)
        body = tokenizer.decode(list(one.ids[one.given + one.docstring :]))
        kept = body.splitlines()[1:]
        assert 1 <= len(kept) < 30
        assert kept == [line.rstrip("\n") for line in lines[: len(kept)]]


def made_up(count: int) -> list[Function]:
    return [
        Function(head=f"def function_{i}(x):", indent="    ", summary=f"Return value {i} of x.", body="    return x\n")
        for i in range(count)
    ]


class TestSequences:
    def test_labels_are_what_follows_heads(self, tokenizer: Tokenizer) -> None:
        """Taken apart at the heads, a sequence is texts of the functions, whole but for the last
        one.
        """
        functions = made_up(9)
        texts = {one.ids: one for f in functions for way in (False, True) for one in [example(f, tokenizer, split=way)]}
        between = tokenizer.encode("\n\n\n").ids
        gaps: Counter[bool] = Counter()
        for ids_T, labels_T in itertools.islice(sequences(functions, tokenizer, length=100, seed=3), 12):
            assert ids_T.shape == labels_T.shape == (100,)
            ids, labels, at = ids_T.tolist(), labels_T.tolist(), 0
            while at < 100:
                one = next(one for one in texts.values() if list(one.ids[: 100 - at]) == ids[at : at + len(one.ids)])
                expected = [IGNORED] * one.given + list(one.ids[one.given :])
                assert labels[at : at + len(expected)] == expected[: 100 - at]
                at += len(one.ids)
                if at < 100:
                    gap = 1 if ids[at] == END_ID else len(between)
                    assert ids[at : at + gap] == ([END_ID] if gap == 1 else between)[: 100 - at]
                    assert labels[at : at + gap] == [IGNORED] * len(labels[at : at + gap])
                    gaps[ids[at] == END_ID] += 1
                    at += gap
        assert min(gaps.values()) > 5
        assert len(gaps) == 2

    def test_order_depends_on_the_seed_alone(self, tokenizer: Tokenizer) -> None:
        def first(seed: int) -> list[list[int]]:
            texts = sequences(made_up(20), tokenizer, length=80, seed=seed)
            return [ids_T.tolist() for ids_T, _ in itertools.islice(texts, 12)]

        assert first(1) == first(1)
        assert first(1) != first(2)

    def test_each_function_comes_in_each_epoch(self, tokenizer: Tokenizer) -> None:
        texts = sequences(made_up(8), tokenizer, length=64, seed=0)
        text = "".join(tokenizer.decode(ids_T.tolist()) for ids_T, _ in itertools.islice(texts, 30))
        assert all(f"def function_{i}(x)" in text for i in range(8))

    def test_fewer_functions_than_fill_a_sequence(self, tokenizer: Tokenizer) -> None:
        """They come again and again, epoch after epoch."""
        ids_T, _ = next(sequences(made_up(1), tokenizer, length=128, seed=0))
        assert tokenizer.decode(ids_T.tolist()).count("def function_0(x)") > 3

    def test_functions_that_are_too_long(self, tokenizer: Tokenizer) -> None:
        long = Function(head="def f(" + "x, " * 80 + "):", indent="    ", summary="Return nothing.", body="")
        ids_T, _ = next(sequences([long, *made_up(3)], tokenizer, length=64, seed=0))
        assert "x, x" not in tokenizer.decode(ids_T.tolist())
        with pytest.raises(ValueError, match="none of 1 functions fits into 64 tokens"):
            next(sequences([long], tokenizer, length=64, seed=0))


class Parrot:
    """Writes the docstring of each function that it knows, and stops; gives the next token a
    probability of 1.
    """

    device = torch.device("cpu")

    def __init__(self, tokenizer: Tokenizer, known: list[Function], silent: int = 0) -> None:
        self.texts = {
            tuple(one.ids[: one.given + extra]): one
            for index, function in enumerate(known)
            for split, extra in ((False, 1), (True, 0))
            if index >= silent
            for one in [example(function, tokenizer, split=split)]
        }

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any) -> torch.Tensor:
        rows = []
        for row, mask in zip(input_ids, attention_mask, strict=True):
            prompt = tuple(row[mask.bool()].tolist())
            one = self.texts.get(prompt)
            new = list(one.ids[len(prompt) : one.given + one.docstring]) if one else []
            rows.append(new[: options["max_new_tokens"]] + [END_ID] * (options["max_new_tokens"] - len(new)))
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)

    def __call__(self, input_ids: torch.Tensor) -> Any:
        certain = torch.nn.functional.one_hot(torch.roll(input_ids, -1, dims=-1), 4096).float() * 100
        return type("Output", (), {"logits": certain})


class TestMeasurement:
    @pytest.mark.parametrize("silent", [0, 30, 40])
    def test_of_a_model_that_knows_the_docstrings(self, tokenizer: Tokenizer, silent: int) -> None:
        functions = made_up(40)
        found = evaluation.measure(Parrot(tokenizer, functions, silent), tokenizer, functions, progress=io.StringIO())
        share = (40 - silent) / 40
        assert (found.opened, found.opened_after_newline, found.closed) == (share, share, share)
        assert found.loss == pytest.approx(0.0, abs=1e-6)  # 1 + 1e-6 in float32, some units

    def test_loss_is_that_of_docstring_tokens(self, tokenizer: Tokenizer) -> None:
        """Against one function at a time, in float64, with the log-probabilities written out."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
        functions = [*made_up(2), Function(head="def longer_name(a, b, c):", indent="    ", summary="Return.", body="")]
        terms: list[float] = []
        for function in functions:
            one = example(function, tokenizer, split=False)
            with torch.inference_mode():
                logits_TV = model(input_ids=torch.tensor([one.ids])).logits[0].double()
            logprobs_TV = logits_TV - logits_TV.exp().sum(-1, keepdim=True).log()
            terms += [-logprobs_TV[t - 1, one.ids[t]].item() for t in range(one.given, one.given + one.docstring)]
        assert evaluation.docstring_loss(model, tokenizer, functions) == pytest.approx(
            sum(terms) / len(terms),
            rel=1e-5,  # a mean of float32 logits against float64
        )

    @pytest.mark.parametrize(
        ("text", "expected"),
        [('"""x', True), ('    """', True), ("'''x", False), ("return 1", False), ('\n    """', False), ("", False)],
    )
    def test_opens(self, text: str, expected: bool) -> None:
        assert evaluation.opens(text) is expected


class TestSettings:
    @pytest.mark.parametrize(
        "change",
        [
            {"rank": 0},
            {"alpha": -1},
            {"steps": 0},
            {"batch": 0},
            {"learning_rate": 0.0},
            {"evaluated": 0},
            {"heldout_every": 1},
            {"sequence_length": 63},
            {"seed": -1},
            {"sources": ()},
        ],
    )
    def test_bad_values_are_refused_by_name(self, change: dict[str, Any]) -> None:
        with pytest.raises(InvalidArgument, match=next(iter(change))):
            Settings(**change)

    def test_schedule(self) -> None:
        scales = [learning_rate_scale(step, 100) for step in range(100)]
        assert scales[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
        assert scales[5:] == sorted(scales[5:], reverse=True)
        assert 0 < scales[-1] < 0.02
        assert learning_rate_scale(0, 1) == 1.0


SMALL = ["--sources", "json", "email", "--heldout-every", "5", "--evaluated", "8", "--quiet"]
SHORT = ["--steps", "6", "--batch", "2", "--sequence-length", "128"]


def run(output: Path, *options: str) -> tuple[int, str]:
    """Exit status and standard output of a short run."""
    text = io.StringIO()
    with redirect_stdout(text):
        status = train.main(["--output", str(output), *SMALL, *options])
    return status, text.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The directory of a short run, and the figures that it printed."""
    pytest.importorskip("peft", reason="the recipe trains with PEFT, which is not installed")
    output = tmp_path_factory.mktemp("run") / "adapter"
    before = torch.get_rng_state()
    status, text = run(output, *SHORT)
    assert status == 0
    assert torch.equal(torch.get_rng_state(), before)  # A caller's generator is left alone.
    return output, json.loads(text.splitlines()[0])


@pytest.mark.slow
class TestTraining:
    def test_makes_an_adapter_of_the_form_that_is_shipped(self, trained: tuple[Path, dict[str, Any]]) -> None:
        output, _ = trained
        assert {path.name for path in output.iterdir()} == FILES
        ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (output, SHIPPED))
        form = {key: (tensor.shape, tensor.dtype) for key, tensor in ours.items()}
        assert form == {key: (tensor.shape, tensor.dtype) for key, tensor in theirs.items()}
        mine, shipped = (json.loads((path / "adapter_config.json").read_text()) for path in (output, SHIPPED))
        # Another release of PEFT may know other options; what both know is equal.
        known = (mine.keys() & shipped.keys()) - {"peft_version"}
        assert {key: mine[key] for key in known} == {key: shipped[key] for key in known}
        assert {"r", "lora_alpha", "target_modules", "peft_type", "base_model_name_or_path"} <= known

    def test_learns_and_measures_what_it_wrote(
        self, trained: tuple[Path, dict[str, Any]], tokenizer: Tokenizer
    ) -> None:
        """The figures are those of the files; six steps are enough for a smaller loss."""
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        output, figures = trained
        base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
        _, heldout, _ = collect_functions(Settings(sources=("json", "email"), heldout_every=5, evaluated=8))
        assert len(heldout) == 8
        loss = evaluation.docstring_loss(base, tokenizer, heldout)
        assert figures["base"]["loss"] == pytest.approx(loss, rel=1e-4)  # float32 in batches of other lengths
        adapted = PeftModel.from_pretrained(base, output).eval()
        adapted_loss = evaluation.docstring_loss(adapted, tokenizer, heldout)
        # The same sums over the same weights: had it not been rounded before it was measured, 1e-5
        # would be seen.
        assert figures["adapter"]["loss"] == pytest.approx(adapted_loss, rel=1e-7)
        assert adapted_loss < loss - 0.05
        readme = (output / "README.md").read_text()
        assert f"| {figures['base']['loss']:.2f} | {figures['adapter']['loss']:.2f} |" in readme
        assert "`json` " in readme
        assert "PSF-2.0" in readme

    def test_again_gives_the_same_bytes(self, trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
        output, _ = trained
        assert run(tmp_path / "again", *SHORT)[0] == 0
        for name in FILES - {"README.md"}:
            assert (tmp_path / "again" / name).read_bytes() == (output / name).read_bytes(), name

    def test_existing_directory_is_kept_unless_forced(
        self, trained: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        mine = tmp_path / "mine"
        mine.mkdir()
        (mine / "note.txt").write_text("kept")
        assert run(mine, "--steps", "1")[0] == 2
        assert "--force" in capsys.readouterr().err
        assert [path.name for path in mine.iterdir()] == ["note.txt"]
        assert run(mine, "--steps", "1", "--batch", "1", "--force")[0] == 0
        assert {path.name for path in mine.iterdir()} == FILES

    def test_refusals_are_one_line_and_leave_nothing(
        self, trained: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        output = tmp_path / "adapter"
        for options, text in (
            (["--rank", "0"], "rank must be greater than 0, got 0"),
            (["--model", "./nowhere"], "no such directory"),
            (["--sources", "no_such_package"], "not installed"),
            (
                ["--sources", "this", "keyword", "--heldout-every", "2"],
                "0 functions with a docstring to train on and 0 to",
            ),
        ):
            assert run(output, *options)[0] == 2
            error = capsys.readouterr().err.splitlines()
            assert error[-1].startswith("error: "), error
            assert text in error[-1], error
            assert not list(tmp_path.iterdir())


def test_without_peft_the_refusal_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    assert run(tmp_path / "adapter")[0] == 2
    assert "pip install transformers peft" in capsys.readouterr().err


class TestShipped:
    def test_files(self) -> None:
        assert {path.name for path in SHIPPED.iterdir()} == FILES
        assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 1_000_000
        config = json.loads((SHIPPED / "adapter_config.json").read_text())
        expected = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "tiny-python",
            "r": 8,
            "lora_alpha": 16,
            "target_modules": sorted(PROJECTIONS),
            "bias": "none",
            "inference_mode": True,
        }
        assert {key: config[key] for key in expected} == expected
        assert not [value for value in config.values() if isinstance(value, str) and ("/" in value or "\\" in value)]

    def test_tensors(self) -> None:
        base = load_file(BASE / "model.safetensors")
        with safe_open(SHIPPED / "adapter_model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not a mapping)
        shapes = {}
        for name, weight in base.items():
            if name.split(".")[-2] in PROJECTIONS:
                outputs, inputs = weight.shape
                module = "base_model.model." + name.removesuffix(".weight")
                shapes |= {f"{module}.lora_A.weight": (8, inputs), f"{module}.lora_B.weight": (outputs, 8)}
        assert len(shapes) == 2 * 7 * 8
        assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == shapes
        for key, tensor in tensors.items():
            assert tensor.dtype == torch.bfloat16, key
            assert tensor.isfinite().all(), key
            assert tensor.any(), key

    def test_writes_docstrings_where_the_base_model_does_not(self, tokenizer: Tokenizer) -> None:
        """Measured over the twelve heads, in float32: the base model opens 0 docstrings after a
        newline, and 6 after newline and indentation, none of which it closes within 32 tokens; with
        the adapter all twelve, of both kinds, are opened and closed.

        The bounds leave room for near ties that another processor decides differently.
        """
        peft = pytest.importorskip("peft", reason="the oracle is PEFT, which is not installed")
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        adapted = peft.PeftModel.from_pretrained(model, SHIPPED).eval()
        newline = [f"{head}\n" for head in HEADS]
        indented = [f"{head}\n{' ' * (8 if head.startswith('class') else 4)}" for head in HEADS]

        def counts() -> tuple[int, int, int]:
            """Opened after a newline, opened after the indentation, opened and closed there."""
            short, long = (
                evaluation.continuations(adapted, tokenizer, prompts, tokens=tokens, progress=io.StringIO())
                for prompts, tokens in ((newline, 3), (indented, 32))
            )
            opened = [text for text in long if evaluation.opens(text)]
            return sum(map(evaluation.opens, short)), len(opened), sum(text.count('"""') > 1 for text in opened)

        with adapted.disable_adapter():
            base = counts()
        assert base[0] <= 1, base
        assert base[1] <= 8, base
        assert base[2] <= 2, base
        assert min(counts()) >= 11, counts()

    def test_quire_writes_what_peft_writes(self, tokenizer: Tokenizer) -> None:
        """Greedy in float32, without and with the adapter; the text of each is that of transformers
        and PEFT.
        """
        peft = pytest.importorskip("peft", reason="the oracle is PEFT, which is not installed")
        from transformers import AutoModelForCausalLM

        from quire import LLM, SamplingParams

        model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        adapted = peft.PeftModel.from_pretrained(model, SHIPPED).eval()
        prompts = [f"{head}\n" for head in HEADS[:4]]
        llm = LLM("tiny-python", dtype="float32", adapters={"docstrings": SHIPPED}, kv_cache_memory="8MiB")
        try:
            for adapter in (None, "docstrings"):
                with contextlib.nullcontext() if adapter else adapted.disable_adapter():
                    texts = evaluation.continuations(adapted, tokenizer, prompts, tokens=16, progress=io.StringIO())
                outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16), adapter=adapter)
                assert [output.outputs[0].text for output in outputs] == texts
        finally:
            llm.close()
