"""Pictures in notebooks and terminals: they show what values hold, quickly, and nothing in a user's
text is markup, a command to a terminal or a turned line.
"""

from __future__ import annotations

import ast
import asyncio
import io
import json
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import quire
from quire import LLM, AsyncLLM, RequestOutput, SamplingParams, describe
from quire.base.display import picture_of
from quire.base.errors import InvalidArgument, QuireError, Unsupported
from quire.base.outputs import CompletionOutput
from quire.contracts.token_views import AttentionView, ChancesView, NormsView, TokenChance
from quire.contracts.views import BranchView, HistoryNode, HistoryView, PoolView
from quire_inspector.drawing.branch_tree import MOST_NODES, tree_of
from quire_inspector.drawing.heat import MOST_COLUMNS, MOST_ROWS, Heat, pooled
from quire_inspector.drawing.page_maps import PageMaps, cells_of
from quire_inspector.drawing.pictures import axes
from quire_inspector.drawing.shown_text import in_html, short, visible
from quire_inspector.drawing.summaries import Summary

HOSTILE = (
    "<script>alert(1)</script>",
    "'\"><img src=x onerror=alert(1)>",
    "\x1b[31mred\x1b]0;title\x07\x9b2J",
    "a\u202eb\u2066c",
    "half \ud800 and \udfff",
    "</code></bdi><svg onload=alert(1)>",
    "$\\frac{$ %s {0} [bold]x[/bold] :smile:",
    "line\nline\r\ttab\u2028end\0",
)
TAGS = {
    *("div", "span", "table", "thead", "tbody", "tr", "td", "th", "ul", "li", "code", "bdi"),
    *("svg", "rect", "title"),
}
ATTRIBUTES = {
    *("style", "scope", "role", "aria-label", "xmlns", "viewbox", "fill", "fill-opacity", "preserveaspectratio"),
    *("x", "y", "width", "height", "stroke", "stroke-opacity"),
}


class Strict(HTMLParser):
    """Fails for whatever pictures have no use for; tags must close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        assert {name for name, _ in attrs} <= ATTRIBUTES, attrs
        for name, value in attrs:
            assert name == "xmlns" or "url(" not in (value or ""), attrs
            assert name in ("xmlns", "aria-label") or "http" not in (value or ""), attrs
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked_html(shown: Any) -> str:
    """The HTML of something, of which every tag and attribute is known."""
    html = shown._repr_html_()
    parser = Strict()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert_harmless(html)
    return str(html)


def checked_text(shown: Any) -> str:
    """What a terminal gets, without the colours of rich."""
    written = io.StringIO()
    console = Console(file=written, width=100, force_terminal=True, color_system="truecolor")
    console.print(shown)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", written.getvalue())
    for line in plain.splitlines():
        assert_harmless(line)
    if not isinstance(shown, (LLM, quire.Session)):
        assert_harmless(str(shown).replace("\n", ""))
    return plain


def assert_harmless(text: str) -> None:
    text.encode()  # no half of a pair
    assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]", text)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM("tiny-python", device="cpu", dtype="float32", kv_cache_memory="8MiB", max_model_len=512)
    yield made
    made.close()


# -- texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_are_spelled(text: str) -> None:
    for shown in (visible(text), short(text), short(text * 99, 40)):
        assert_harmless(shown)
    assert not re.search("[<>\"']", in_html(text))
    assert visible("für 中文 🙂 x") == "für 中文 🙂 x"
    assert visible("a\n\x1b\u202e\ud800") == "a\\n\\x1b\\u202e\\ud800"
    assert len(short("x" * 999, 40)) < 50


def hostile_pictures(text: str) -> list[Any]:
    """Each kind of value with a text everywhere where users have one."""
    chance = TokenChance(3, text, -0.5, 1)
    chances = ChancesView(
        position=1,
        num_tokens=2,
        vocab_size=9,
        token=chance,
        id=3,
        text=text,
        alternatives=(chance,),
        entropy=0.1,
        computed=True,
        num_run=1,
        exact=False,
        generated=True,
        mask=None,
        stop=None,
    )
    branch = BranchView(
        id=f"session:{text}", kind="session", name=text, num_tokens=4, computed=4, adapter=text, pages=1
    )
    node = HistoryNode(id="n", parent=None, start=0, end=4, branches=(branch.id,), head=text, tail=text)
    history = HistoryView(reading=1, branches=(branch,), nodes=(node,))
    output = RequestOutput(
        request_id=text,
        prompt=text,
        prompt_token_ids=[1],
        outputs=[
            CompletionOutput(index=0, text=text, token_ids=[1], finish_reason="stop", stop_reason=text, error=text)
        ],
        cache_note=text,
    )
    heat = Heat(text, np.ones((1, 2), np.float32), [text], np.arange(2), text, text)
    summary = Summary(text, [(text, text)], [(text, text)], [heat])
    return [chances, history, tree_of(history, text, branch.id), output, heat, summary]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_do_nothing_in_pictures(text: str) -> None:
    for shown in hostile_pictures(text):
        assert "alert(1)<" not in checked_html(shown)
        checked_text(shown)


@pytest.mark.turns(3)
@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_do_nothing_in_figures(text: str) -> None:
    pyplot = figures()
    for shown in hostile_pictures(text):
        if isinstance(shown, (RequestOutput, Summary)):
            with pytest.raises(Unsupported, match="nothing to plot"):
                shown.plot()
            continue
        drawn = shown.plot()
        drawn.figure.canvas.draw()
        pyplot.close(drawn.figure)


def figures() -> Any:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


# -- what is shown ---------------------------------------------------------------------------------


def test_sessions_models_outputs_and_files_are_shown(llm: LLM, tmp_path: Path) -> None:
    with llm.session("def add(a, b):\n") as session:
        session.name, session.labels = "<b>mine</b>", {"user": "<i>"}
        for shown in (checked_html(session), checked_text(session)):
            assert "user" in shown
            assert "def add(a, b):\\n" in shown
            assert str(len(session)) in shown
        assert "&lt;b&gt;mine&lt;/b&gt;" in checked_html(session)
        assert "<b>mine</b>" in checked_text(session)
        assert "tiny-python" in checked_html(llm)
        assert "tiny-python" in checked_text(llm)
        assert repr(llm).startswith("<LLM of 'tiny-python', 0 running")
        session.save(tmp_path / "<x>.quire")
        found = describe(tmp_path / "<x>.quire")
        assert "&lt;x&gt;.quire" in checked_html(found)
        assert "LlamaForCausalLM" in checked_text(found)
        assert found.document()["sequences"][0]["num_tokens"] == len(session)
    output = llm.generate("x = <i>", SamplingParams(max_tokens=3, temperature=0))
    one = output[0] if isinstance(output, list) else output
    assert "x = &lt;i&gt;" in checked_html(one)
    assert "3 tokens, length" in checked_text(one)
    with pytest.raises(InvalidArgument) as caught:
        describe(3)  # type: ignore[arg-type]
    assert caught.value.field == "path"
    assert {"describe"} <= set(quire.__all__)


def test_what_is_closed_or_busy_is_shown_at_once(llm: LLM) -> None:
    """Also while another thread has the engine's lock, as a step does."""
    session = llm.session("x = 1")
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with llm.engine.lock:
            entered.set()
            leave.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(60)
    try:
        found: list[str] = []
        looker = threading.Thread(
            target=lambda: found.extend([repr(llm), repr(session), checked_html(llm), checked_html(session)])
        )
        looker.start()
        looker.join(20)
        assert len(found) == 4, "a picture waits for the lock"
        assert "pages" not in found[2]
    finally:
        leave.set()
        holder.join()
    session.close()
    assert "closed" in checked_html(session)
    assert "closed" in checked_text(session)


def test_a_tree_shows_who_shares_and_where_they_part(llm: LLM) -> None:
    with llm.session("def add(a, b):\n    return") as session, llm.session("import os") as stranger:
        at = len(session) - 2
        with session.fork(at=at) as child, session.fork() as twin:
            child.append(" 12")
            twin.append(" * b")
            child.name = "the child"
            tree = session.tree()
            ends = {branch: node for node in tree.nodes for branch in node.branches}
            numbers = {one: f"session:{one._branch.number}" for one in (session, child, twin, stranger)}
            assert tree.marked == numbers[session]
            assert ends[numbers[session]].end == len(session)
            assert ends[numbers[child]].start == at
            assert ends[numbers[twin]].start == len(session)
            assert ends[numbers[twin]].parent == ends[numbers[session]].id
            assert numbers[stranger] not in ends
            text = str(tree)
            assert "▶ session:" in text
            assert f"the child ({numbers[child]})" in text
            assert text.count("session:") == 3
            checked_html(tree)
            assert numbers[stranger] in checked_text(llm.history())
            figures().close(tree.plot().figure)


def test_large_trees_are_cut() -> None:
    nodes = [HistoryNode(id=str(n), parent=None if not n else "0", start=n, end=n + 1) for n in range(MOST_NODES + 7)]
    tree = tree_of(HistoryView(reading=1, branches=(), nodes=tuple(nodes)), "large")
    assert "7 more runs" in str(tree)
    assert checked_html(tree).count("<li>") == MOST_NODES


def test_pages_are_those_of_the_pool(llm: LLM) -> None:
    with llm.session("x = 1\n" * 30) as session:
        session.compute()
        session.pin()
        maps = llm.pages()
        use = llm.engine.page_use()
        counts = maps.pools[0].counts
        assert counts["pinned"] == use.pinned > 0
        assert counts["free"] == use.free
        text = checked_text(maps)
        assert text.count("█") == counts["pinned"] + 1, "one is in the legend"
        assert f"{counts['pinned']} pinned" in checked_html(maps)
        figures().close(maps.plot().figure)
        checked_html(maps.pools[0])


def test_cells_of_large_pools_stand_for_several_pages() -> None:
    owner = np.zeros(10_000, dtype=np.uint8)
    owner[777] = 3
    pool = PoolView(
        reading=1,
        pool=0,
        references=np.ones(10_000, np.int32),
        owner=owner,
        holder=np.full(10_000, -1, np.int32),
        position=np.full(10_000, -1, np.int32),
        eviction=np.full(10_000, -1, np.int32),
        branches=(),
    )
    owners, _, size = cells_of(pool, 640)
    assert size == 16
    assert len(owners) == 625
    assert owners.tolist().index(3) == 777 // 16
    assert "a cell is 16 pages" in str(PageMaps([pool], [None]))


def test_heat_shows_the_numbers(llm: LLM) -> None:
    with llm.session("def add(a, b):\n    return a + b\n") as session:
        session.compute()
        length = len(session)
        heat = session.heat(layer=1, head=2, queries=5)
        assert heat.values.shape == (5, length)
        for row, position in enumerate(range(length - 5, length)):
            one = session.attention(position, 1, head=2).weights[0]
            assert np.allclose(heat.values[row, : position + 1], one, atol=2**-16)  # two float32 runs
            assert not heat.values[row, position + 1 :].any()
        mean = session.heat(layer=1, queries=2)
        assert np.allclose(mean.values[-1], session.attention(length - 1, 1).weights.mean(0), atol=2**-16)  # as above
        norms = session.norms(0)
        keys = session.heat(layer=0, what="k", head=1)
        assert np.array_equal(keys.values[0], norms.norms["k"][:, 1])
        assert keys.rows == ["1"]
        for shown in (heat, keys, norms, session.attention(3, 0), session.token(3), session.compare(session)):
            checked_html(shown)
            checked_text(shown)
        for shown in (heat, keys, session.attention(3, 0), session.token(3), session.compare(session)):
            figures().close(shown.plot().figure)
        for field, given in (
            ("what", {"what": "q"}),
            ("what", {"what": "state_0"}),
            ("queries", {"queries": 0}),
            ("head", {"head": 99}),
            ("head", {"what": "v", "head": 99}),
            ("layer", {"layer": 99}),
        ):
            with pytest.raises(InvalidArgument) as caught:
                session.heat(**{"layer": 0, **given})  # type: ignore[arg-type]
            assert caught.value.field == field
        session.set_kv(0, start=1, v=session.kv(0)["v"][1:2] * 2)
        with pytest.raises(QuireError, match="one token at a time"):
            session.heat(layer=0)
        assert session.heat(layer=0, queries=1).values.shape == (1, length)


def test_what_is_shown_without_arguments(llm: LLM) -> None:
    """The next token, and what the last one reads at the last layer that has what is asked for."""
    with llm.session("def add(a, b):\n    return a + b\n") as session:
        session.compute()
        length, last = len(session), len(llm.model.layer_specs) - 1
        assert session.token().position == length
        assert (session.attention().position, session.attention().layer) == (length - 1, last)
        assert (session.norms().layer, session.attention(3).position) == (last, 3)
        assert np.array_equal(session.heat().values, session.heat(layer=last, queries=64).values)
        assert np.array_equal(session.heat(what="k").values, session.heat(layer=last, what="k").values)
        for refused in (lambda: session.token(-1), lambda: session.attention(length), lambda: session.heat(what="x")):
            with pytest.raises(InvalidArgument):
                refused()


def test_a_heat_map_has_as_many_rows_as_are_not_too_large(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with llm.session([5] * 100) as session:
        heads = llm.model.layer_specs[0].num_heads  # type: ignore[union-attr]
        monkeypatch.setattr("quire.sessions.layer_views.MOST_WEIGHTS", 7 * heads * len(session))
        assert session.heat().values.shape == (7, len(session))
        with pytest.raises(InvalidArgument, match="give fewer queries"):
            session.heat(queries=8)


def test_a_text_in_a_notebook_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rich finds a notebook it shows what it prints, besides what the notebook shows."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(Summary("a title", [("name", "value")])).split() == ["a", "title", "name", "value"]


def test_outputs_are_a_table(llm: LLM) -> None:
    outputs = llm.generate(["def f(<b>", [5, 6, 7]], SamplingParams(max_tokens=3, n=2, seed=1), use_tqdm=False)
    assert outputs == list(outputs)
    assert pickle.loads(pickle.dumps(outputs)) == outputs
    html, text = checked_html(outputs), checked_text(picture_of(outputs))
    assert html.count("<tr>") == 1 + 4
    for shown in ("2 outputs", "3 tokens, length", "0 of 3"):
        assert shown in html
        assert shown in text
    assert "&lt;b&gt;" in html


def test_large_heat_maps_keep_their_peaks() -> None:
    values = np.zeros((200, 5000), dtype=np.float32)
    values[150, 4321] = 2.0
    cells = pooled(values, MOST_ROWS, MOST_COLUMNS)
    assert cells.shape == (MOST_ROWS, MOST_COLUMNS)
    assert (cells > 0).sum() == 1
    heat = Heat("large", values, [str(n) for n in range(200)], np.arange(5000), "query", "weight")
    assert checked_html(heat).count("<rect") == 1
    assert str(heat).count("█") == 1
    empty = Heat("none", np.zeros((2, 0), np.float32), ["0", "1"], np.arange(0), "head", "norm")
    assert "nothing is held" in checked_html(empty)
    assert "nothing is held" in checked_text(empty)


def test_numbers_that_are_not_finite_are_drawn() -> None:
    values = np.array([[np.nan, np.inf, 1.0]], dtype=np.float32)
    heat = Heat("odd", values, ["0"], np.arange(3), "head", "norm")
    checked_html(heat)
    checked_text(heat)


def test_awaited_sessions_are_shown() -> None:
    async def run() -> None:
        async with AsyncLLM("tiny-python", device="cpu", dtype="float32", kv_cache_memory="8MiB") as made:
            session = await made.session("x = 1")
            assert "x = 1" in checked_html(session)
            assert (await session.tree()).marked is not None
            assert (await session.heat(layer=0, queries=1)).values.shape[0] == 1
            assert (await session.compare(session)).shared == len(session)
            assert (await session.token(1)).position == 1
            assert "pages" in checked_text(await made.pages())
            assert "x = 1" in checked_html(await made.history())

    asyncio.run(run())


def test_without_matplotlib_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unsupported, match="plot needs matplotlib, which is not installed"):
        axes(None)
    view = AttentionView(
        position=0,
        layer=0,
        kind="full",
        num_heads=1,
        heads=(0,),
        weights=np.ones((1, 1), np.float32),
        sinks=np.zeros(1, np.float32),
        num_run=1,
        exact=True,
    )
    with pytest.raises(Unsupported, match="notebook"):
        view.plot()
    checked_html(view)


def test_drawing_knows_values_only() -> None:
    import subprocess

    code = "import sys, quire_inspector.drawing.painters as p; print(sorted(m for m in ('torch', 'matplotlib') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_view_of_a_token_has_a_picture() -> None:
    from quire.contracts import token_views
    from quire_inspector.drawing.painters import PICTURES, picture_of

    views = [one for name, one in vars(token_views).items() if name.endswith("View") and hasattr(one, "plot")]
    assert len(views) == 4
    assert set(views) <= set(PICTURES)
    with pytest.raises(Unsupported, match="has no picture"):
        picture_of(object())


def empty_norms() -> NormsView:
    return NormsView(
        layer=0, kind="full", num_tokens=0, positions=np.arange(0), norms={"k": np.zeros((0, 2), np.float32)}
    )


@pytest.mark.parametrize("make", [empty_norms])
def test_empty_views_are_drawn(make: Callable[[], Any]) -> None:
    checked_html(make())
    checked_text(make())


# -- the notebook ----------------------------------------------------------------------------------


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells one after the other; what a cell ends with is shown as a notebook would."""
    pyplot = figures()
    monkeypatch.chdir(tmp_path)
    book = json.loads((Path(__file__).parents[2] / "examples" / "looking.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in book["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert not cell["outputs"], "a notebook is committed without its outputs"
        *before, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(before, []), "looking.ipynb", "exec"), names)
        if not isinstance(last, ast.Expr):
            exec(compile(ast.Module([last], []), "looking.ipynb", "exec"), names)
            continue
        found = eval(compile(ast.Expression(last.value), "looking.ipynb", "eval"), names)
        if hasattr(found, "_repr_html_"):
            shown.append(checked_html(found))
        elif found is not None:
            assert found.figure is not None
            found.figure.canvas.draw()
            pyplot.close(found.figure)
    assert len(shown) == 10
