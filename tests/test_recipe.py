"""The recipe of the bundled model in miniature: its stages, its promises about truth, order and
resumption.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quire.base.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.tiny_python import cli, corpus, packing, synthetic, vocabulary
from recipes.tiny_python.evaluate import evaluate, heldout_loss, recall_of_values
from recipes.tiny_python.export import export
from recipes.tiny_python.network import Optimizers, build_model, learning_rate_scale
from recipes.tiny_python.settings import PRESETS, Recipe, Workplace
from recipes.tiny_python.train import Run, TrainingOptions, load_run, train

BUNDLED = Path(__file__).resolve().parents[1] / "src/quire/data/tiny-python"

TINY = Recipe(
    sources=("json", "email"),
    heldout_every=5,
    vocab_size=400,
    sequence_length=128,
    hidden_size=32,
    layers=2,
    heads=2,
    kv_heads=1,
    head_size=16,
    intermediate_size=64,
    max_positions=256,
    steps=20,
    batch=4,
    warmup_steps=2,
)
CPU = TrainingOptions(device="cpu", report_every=5)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A work directory after ``pack``."""
    work = Workplace(root=tmp_path_factory.mktemp("packed"))
    corpus.collect(TINY, work)
    vocabulary.train_tokenizer(TINY, work)
    packing.pack(TINY, work)
    return work


def copy_of(packed: Workplace, root: Path) -> Workplace:
    """A work directory of its own with the same inputs of training."""
    work = Workplace(root=root / "work")
    work.root.mkdir()
    for path in packed.root.iterdir():
        (work.root / path.name).symlink_to(path)
    return work


@pytest.fixture(scope="module")
def trained(packed: Workplace, tmp_path_factory: pytest.TempPathFactory) -> tuple[Workplace, Run]:
    """A finished and evaluated run; tests only read it."""
    work = copy_of(packed, tmp_path_factory.mktemp("trained"))
    run = train(TINY, work, CPU, progress=io.StringIO())
    evaluate(work, sequences=4, files=4, device="cpu")
    return work, run


class TestSynthetic:
    @given(st.integers(0, 10_000), st.integers(2, 60))
    def test_every_assertion_holds(self, index: int, largest: int) -> None:
        source = synthetic.make_source(synthetic.generator(0, "train", index), largest)
        names: dict[str, object] = {}
        exec(source.text, names)
        del names["__builtins__"]
        assert 2 <= len(names) <= largest
        assert source.checks
        assert source.text.count("assert ") == len(source.checks) >= len(names) / 2
        for check in source.checks:
            assert source.text[check.start : check.stop] == str(names[check.name])
            assert 1000 <= int(source.text[check.start : check.stop]) <= 9999

    def test_hops_count_the_aliases_between_a_name_and_its_number(self) -> None:
        seen = set()
        for index in range(50):
            source = synthetic.make_source(synthetic.generator(1, "train", index), 40)
            lines = source.text.partition("# checks")[0].splitlines()
            assigned = dict(line.split(" = ") for line in lines if not line.startswith("#"))
            for check in source.checks:
                hops, value = 0, assigned[check.name]
                while not value.isdigit():
                    hops, value = hops + 1, assigned[value]
                assert hops == check.hops
                seen.add(hops)
        assert {0, 1, 2} <= seen

    def test_checks_are_shuffled_about_half_of_the_time(self) -> None:
        shuffled = 0
        for index in range(300):
            source = synthetic.make_source(synthetic.generator(2, "train", index), 40)
            places = [source.text.index(f"\n{check.name} = ") for check in source.checks]
            shuffled += places != sorted(places)
        assert 110 < shuffled < 190  # six standard deviations of a fair coin, less the rare sorted shuffles

    def test_names(self) -> None:
        assert len(set(synthetic.NAMES)) == 1600

    def test_training_and_evaluation_see_different_text(self) -> None:
        texts = {
            purpose: {synthetic.make_source(synthetic.generator(0, purpose, i), 9).text for i in range(100)}
            for purpose in ("train", "evaluate")
        }
        assert not texts["train"] & texts["evaluate"]


class TestCorpus:
    def test_split_is_disjoint_and_by_path(self, packed: Workplace) -> None:
        train_paths = [document.path for document in corpus.read_documents(packed.train_text)]
        held_paths = [document.path for document in corpus.read_documents(packed.heldout_text)]
        assert train_paths
        assert held_paths
        assert not set(train_paths) & set(held_paths)
        assert all(corpus.is_heldout(path, TINY.heldout_every) for path in held_paths)
        assert "json/decoder.py" in train_paths + held_paths

    def test_origins_are_noted(self, packed: Workplace) -> None:
        origins = json.loads(packed.sources.read_text())
        assert [(o["source"], o["licence"]) for o in origins] == [("json", "PSF-2.0"), ("email", "PSF-2.0")]
        assert sum(o["files"] for o in origins) == sum(
            1 for path in (packed.train_text, packed.heldout_text) for _ in corpus.read_documents(path)
        )

    def test_licence_of_a_package_comes_from_its_metadata(self, tmp_path: Path) -> None:
        recipe = dataclasses.replace(TINY, sources=("hypothesis",))
        (origin,) = corpus.collect(recipe, Workplace(root=tmp_path))
        assert "MPL" in origin.licence or "Mozilla" in origin.licence

    def test_duplicates_and_unreadable_files_are_left_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "made_up_package"
        package.mkdir()
        for index in range(20):
            (package / f"m{index}.py").write_text(f"x = {index}\n")
        (package / "copy.py").write_text("x = 3\n")
        (package / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\ny = '\xe9'\n")
        (package / "broken.py").write_bytes(b"z = '\xff'\n")
        (package / "long.py").write_text("#" * 2000)
        (package / "empty.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path))
        recipe = dataclasses.replace(TINY, sources=("made_up_package",), max_file_bytes=1000, heldout_every=4)
        work = Workplace(root=tmp_path / "work")
        (origin,) = corpus.collect(recipe, work)
        assert origin.files == 21
        assert origin.licence.startswith("unknown")
        documents = [*corpus.read_documents(work.train_text), *corpus.read_documents(work.heldout_text)]
        assert any("é" in document.text for document in documents)

    @pytest.mark.parametrize(
        ("source", "error", "message"),
        [
            ("no_such_package_here", NotFound, "not installed"),
            ("torch.nn", InvalidArgument, "top-level"),
            ("math", NotFound, "no Python source"),
        ],
    )
    def test_refused_sources_leave_no_trace(
        self, tmp_path: Path, source: str, error: type[Exception], message: str
    ) -> None:
        work = Workplace(root=tmp_path / "work")
        with pytest.raises(error, match=message):
            corpus.collect(dataclasses.replace(TINY, sources=("json", source)), work)
        assert not work.root.exists()

    def test_empty_side_of_the_split_is_refused(self, tmp_path: Path) -> None:
        recipe = dataclasses.replace(TINY, sources=("this",), heldout_every=1000)
        with pytest.raises(FailedPrecondition, match="both sides"):
            corpus.collect(recipe, Workplace(root=tmp_path))
        assert not list(tmp_path.iterdir())


class TestTokenizer:
    def test_same_structure_as_the_bundled_one(self, packed: Workplace) -> None:
        ours = json.loads(packed.tokenizer.read_text())
        bundled = json.loads((BUNDLED / "tokenizer.json").read_text())
        for part in ("pre_tokenizer", "decoder", "normalizer", "added_tokens"):
            assert ours[part] == bundled[part], part

    def test_round_trip(self, packed: Workplace) -> None:
        tokenizer = vocabulary.load_tokenizer(packed)

        @given(st.text())
        def check(text: str) -> None:
            assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text

        check()

    def test_digits_and_indentation(self, packed: Workplace) -> None:
        tokenizer = vocabulary.load_tokenizer(packed)
        tokens = tokenizer.encode("x = 8031\n    y").tokens
        assert [token for token in tokens if token.isdigit()] == list("8031")
        assert "Ċ" + "Ġ" * 4 in tokens

    def test_too_little_text_is_refused(self, packed: Workplace, tmp_path: Path) -> None:
        work = Workplace(root=tmp_path)
        work.train_text.write_text(json.dumps({"path": "a.py", "text": "x = 1\n"}) + "\n")
        with pytest.raises(FailedPrecondition, match="vocab_size"):
            vocabulary.train_tokenizer(TINY, work)
        assert not work.tokenizer.exists()


class TestSequences:
    def sequences(self, packed: Workplace, **changes: object) -> packing.TrainingSequences:
        recipe = dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]
        return packing.TrainingSequences(
            recipe, packing.load_tokens(packed.train_tokens), vocabulary.load_tokenizer(packed)
        )

    def test_order_does_not_depend_on_what_was_read_before(self, packed: Workplace) -> None:
        one = self.sequences(packed)
        in_order = [one[i] for i in range(40)]
        shuffled = self.sequences(packed)
        for index in random.Random(0).sample(range(40), 40):
            assert torch.equal(shuffled[index], in_order[index])
        other = self.sequences(packed, seed=1)
        assert not torch.equal(other[0], in_order[0])

    def test_every_batch_has_its_share_of_made_up_sequences(self, packed: Workplace) -> None:
        sequences = self.sequences(packed)
        tokenizer = vocabulary.load_tokenizer(packed)
        for step in range(5):
            texts = [tokenizer.decode(sequences[4 * step + i].tolist()) for i in range(4)]
            assert sum(text.startswith("# module ") for text in texts) == 1

    def test_an_epoch_sees_each_window_once(self, packed: Workplace) -> None:
        sequences = self.sequences(packed, synthetic_fraction=0.0)
        tokens = packing.load_tokens(packed.train_tokens)
        windows = (len(tokens) - TINY.sequence_length) // TINY.sequence_length
        for epoch in range(2):
            seen = torch.cat([sequences[epoch * windows + i][:-1] for i in range(windows)])
            size = windows * TINY.sequence_length
            cuts = (tokens[cut : cut + size] for cut in range(TINY.sequence_length))
            counts = torch.bincount(seen)
            assert any(torch.equal(torch.bincount(torch.from_numpy(row.astype("int64"))), counts) for row in cuts)

    def test_documents_end_with_the_end_token(self, packed: Workplace) -> None:
        tokens = packing.load_tokens(packed.train_tokens)
        documents = sum(1 for _ in corpus.read_documents(packed.train_text))
        assert int((tokens == vocabulary.END_ID).sum()) == documents
        assert tokens[-1] == vocabulary.END_ID


class TestTraining:
    def test_loss_falls(self, trained: tuple[Workplace, Run]) -> None:
        _, run = trained
        assert run.finished
        assert run.step == len(run.losses) == TINY.steps
        assert abs(run.losses[0] - torch.tensor(float(TINY.vocab_size)).log().item()) < 0.5  # begins at chance
        assert max(run.losses[-3:]) < run.losses[0] - 0.5

    def test_resumed_run_gives_the_losses_of_an_uninterrupted_one(
        self, packed: Workplace, trained: tuple[Workplace, Run], tmp_path: Path
    ) -> None:
        work = copy_of(packed, tmp_path)
        first = train(TINY, work, dataclasses.replace(CPU, stop_after=7), progress=io.StringIO())
        assert first.step == 7
        resumed = train(TINY, work, dataclasses.replace(CPU, resume=True), progress=io.StringIO())
        assert resumed.losses == trained[1].losses
        for name, weight in trained[1].model.state_dict().items():
            assert torch.equal(resumed.model.state_dict()[name], weight), name
        steps = [json.loads(line)["step"] for line in work.log.read_text().splitlines()]
        assert steps == [5, 7, 10, 15, 20]

    def test_micro_batches_and_workers_change_nothing_but_rounding(
        self, packed: Workplace, trained: tuple[Workplace, Run], tmp_path: Path
    ) -> None:
        recipe = dataclasses.replace(TINY, micro_batch=2)
        options = dataclasses.replace(CPU, stop_after=1, loader_workers=1)
        run = train(recipe, copy_of(packed, tmp_path), options, progress=io.StringIO())
        assert run.losses[0] == pytest.approx(trained[1].losses[0], rel=2**-8)  # bfloat16

    def test_interrupt_finishes_the_step_and_saves(
        self, packed: Workplace, trained: tuple[Workplace, Run], tmp_path: Path
    ) -> None:
        work = copy_of(packed, tmp_path)

        class PressesCtrlC(io.StringIO):
            def write(self, text: str) -> int:
                os.kill(os.getpid(), signal.SIGINT)
                return super().write(text)

        run = train(TINY, work, dataclasses.replace(CPU, report_every=3), progress=PressesCtrlC())
        assert not run.finished
        assert run.step == 3
        assert load_run(work, torch.device("cpu")).losses == trained[1].losses[:3]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_refusals(self, packed: Workplace, trained: tuple[Workplace, Run], tmp_path: Path) -> None:
        work, _ = trained
        before = work.checkpoint.read_bytes()
        resume = dataclasses.replace(CPU, resume=True)
        with pytest.raises(AlreadyExists, match="--resume"):
            train(TINY, work, CPU)
        with pytest.raises(FailedPrecondition, match=r"muon_lr: 0\.1 here, 0\.006 there"):
            train(dataclasses.replace(TINY, muon_lr=0.1), work, resume)
        with pytest.raises(FailedPrecondition, match="vocab_size"):
            train(dataclasses.replace(TINY, vocab_size=500), work, resume)
        with pytest.raises(InvalidArgument, match="one of them"):
            train(TINY, work, dataclasses.replace(CPU, resume=True, force=True))
        with pytest.raises(FailedPrecondition, match="'train' first"):
            train(TINY, copy_of(packed, tmp_path), resume)
        with pytest.raises(FailedPrecondition, match="'pack' first"):
            train(TINY, Workplace(root=tmp_path / "empty"), CPU)
        assert work.checkpoint.read_bytes() == before

    def test_each_weight_has_one_optimizer(self) -> None:
        model = build_model(TINY)
        state = Optimizers(model, TINY).state_dict()
        muon, adamw = (len(state[name]["param_groups"][0]["params"]) for name in ("muon", "adamw"))
        assert muon == 7 * TINY.layers
        assert adamw == 1 + 2 * TINY.layers + 1  # tied embeddings, norms
        assert muon + adamw == len(list(model.parameters()))

    def test_schedule(self) -> None:
        recipe = PRESETS["bundled"]
        scales = [learning_rate_scale(recipe, step) for step in range(recipe.steps)]
        assert scales[:60] == sorted(scales[:60])
        assert 0 < scales[0] < 0.02
        assert scales[60:1351] == [1.0] * 1291
        assert scales[1350:] == sorted(scales[1350:], reverse=True)
        assert scales[-1] == pytest.approx(recipe.final_scale)


class TestExport:
    def test_transformers_loads_it_with_the_same_logits(self, trained: tuple[Workplace, Run], tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        work, run = trained
        output = export(work, tmp_path / "model")
        assert AutoModelForCausalLM.from_pretrained(output).dtype == torch.bfloat16
        loaded = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(output)
        ids = tokenizer("import json\n\ndef f(x):\n    return 12", return_tensors="pt").input_ids
        own = build_model(TINY)
        own.load_state_dict({name: w.bfloat16().float() for name, w in run.model.state_dict().items()})
        with torch.inference_mode():
            assert torch.equal(loaded(ids).logits, own(ids).logits)
        assert tokenizer.decode(ids[0]) == "import json\n\ndef f(x):\n    return 12"
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)

    def test_quire_runs_it(self, trained: tuple[Workplace, Run], tmp_path: Path) -> None:
        """The same greedy tokens as the trained module gives, and the text that belongs to them."""
        from quire import LLM, SamplingParams

        work, run = trained
        llm = LLM(export(work, tmp_path / "model"), dtype="float32", kv_cache_memory="8MiB")
        output = llm.generate("import json\n", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0]
        own = build_model(TINY)
        own.load_state_dict({name: w.bfloat16().float() for name, w in run.model.state_dict().items()})
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        with torch.inference_mode():
            best = own(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        assert output.outputs[0].token_ids == best[len(output.prompt_token_ids) - 1 : -1]
        assert llm.tokenizer is not None
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)
        assert llm.tokenizer.chat_template == (BUNDLED / "chat_template.jinja").read_text(encoding="utf-8")

    def test_figures_are_those_of_the_exported_model(self, trained: tuple[Workplace, Run], tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        work, _ = trained
        loaded = AutoModelForCausalLM.from_pretrained(export(work, tmp_path / "model"))
        tokens = packing.load_tokens(work.heldout_tokens)
        figures = json.loads(work.evaluation.read_text())
        assert heldout_loss(loaded, TINY, tokens, sequences=4, batch=8)[0] == figures["heldout_loss"]

    def test_readme_states_the_measured_figures(self, trained: tuple[Workplace, Run], tmp_path: Path) -> None:
        work, _ = trained
        figures = json.loads(work.evaluation.read_text())
        readme = (export(work, tmp_path / "model") / "README.md").read_text()
        assert f"{figures['heldout_loss']:.2f} nats" in readme
        assert f"{figures['recall']['digits']:.1%} of the digits" in readme
        assert "PSF-2.0" in readme

    def test_existing_directory_is_kept_unless_forced(self, trained: tuple[Workplace, Run], tmp_path: Path) -> None:
        work, _ = trained
        output = tmp_path / "model"
        output.mkdir()
        (output / "mine.txt").write_text("kept")
        with pytest.raises(AlreadyExists, match="--force"):
            export(work, output)
        assert [path.name for path in output.iterdir()] == ["mine.txt"]
        export(work, output, force=True)
        assert not (output / "mine.txt").exists()
        assert [path.name for path in tmp_path.iterdir()] == ["model"]

    def test_stale_evaluation_is_refused(self, trained: tuple[Workplace, Run], tmp_path: Path) -> None:
        work = copy_of(trained[0], tmp_path)
        work.evaluation.unlink()
        work.evaluation.write_text(json.dumps({"step": 3}))
        with pytest.raises(FailedPrecondition, match="evaluate again"):
            export(work, tmp_path / "model")
        assert not (tmp_path / "model").exists()


class TestEvaluation:
    def test_recall_of_a_model_that_looks_everything_up_is_one(self, packed: Workplace) -> None:
        """An oracle that knows the next token where it is a digit, and nothing else, scores 1."""
        tokenizer = vocabulary.load_tokenizer(packed)
        digits = torch.tensor([tokenizer.token_to_id(digit) for digit in "0123456789"])

        class Oracle(torch.nn.Module):
            def __init__(self, shift: int) -> None:
                super().__init__()
                self.anchor = torch.nn.Parameter(torch.zeros(()))
                self.shift = shift

            def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
                answers = torch.roll(input_ids, -self.shift, dims=-1)
                answers = torch.where(torch.isin(answers, digits), answers, vocabulary.END_ID)
                logits = torch.nn.functional.one_hot(answers, TINY.vocab_size).float()
                return type("Output", (), {"logits": logits})

        right = recall_of_values(Oracle(1), TINY, tokenizer, files=20, batch=3)
        assert (right.digits, right.direct_digits, right.alias_digits, right.values) == (1, 1, 1, 1)
        assert right.alias_checks > 0
        wrong = recall_of_values(Oracle(0), TINY, tokenizer, files=20, batch=3)
        assert wrong.digits < 0.3
        assert wrong.values == 0

    def test_bundled_model_has_the_recall_that_it_claims(self) -> None:
        """Ties the metric to a model that is known to recall: 91 % of the digits."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(BUNDLED)
        tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
        recipe = dataclasses.replace(PRESETS["bundled"], sequence_length=256)
        recall = recall_of_values(model, recipe, tokenizer, files=6, batch=6)
        assert recall.digits > 0.7


class TestSettings:
    @pytest.mark.parametrize(
        "change",
        [
            {"steps": 0},
            {"heads": 3},
            {"vocab_size": 100},
            {"vocab_size": 70_000},
            {"micro_batch": 3},
            {"sequence_length": 8192},
            {"sequence_length": 32},
            {"head_size": 15},
            {"synthetic_fraction": 1.5},
            {"heldout_every": 1},
            {"sources": ()},
            {"seed": -1},
        ],
    )
    def test_bad_values_are_refused_by_name(self, change: dict[str, object]) -> None:
        with pytest.raises(InvalidArgument, match=next(iter(change))):
            dataclasses.replace(Recipe(), **change)  # type: ignore[arg-type]

    def test_bundled_preset_is_the_bundled_configuration(self) -> None:
        config = build_model(PRESETS["bundled"]).config
        for name, value in json.loads((BUNDLED / "config.json").read_text()).items():
            if name not in ("transformers_version", "architectures", "dtype"):
                assert getattr(config, name) == value, name

    def test_round_trip(self) -> None:
        for recipe in (*PRESETS.values(), TINY):
            assert Recipe.from_dict(json.loads(json.dumps(recipe.as_dict()))) == recipe


class TestCommandLine:
    def test_all_stages(self, tmp_path: Path) -> None:
        options: list[str] = []
        for name, value in TINY.as_dict().items():
            if value != getattr(Recipe(), name):
                options += [f"--{name.replace('_', '-')}", *([*value] if isinstance(value, list) else [str(value)])]
        places = ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "model")]
        run = ["--steps", "3", "--device", "cpu", "--eval-sequences", "2", "--eval-files", "2"]
        assert cli.main(["all", *places, *options, *run, "--stop-after", "2"]) == 0
        assert "2 steps of the 3" in (tmp_path / "model/README.md").read_text()
        assert cli.main(["all", *places, *options, *run]) == 2  # exists
        (tmp_path / "model").rename(tmp_path / "first")
        assert cli.main(["all", *places, *options, *run, "--resume"]) == 0
        assert (tmp_path / "model/model.safetensors").exists()

    def test_refusal_is_one_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["pack", "--work", str(tmp_path / "nothing")]) == 2
        error = capsys.readouterr().err.splitlines()
        assert error[-1].startswith("error: ")
        assert "'collect' first" in error[-1]
        assert not (tmp_path / "nothing").exists()
