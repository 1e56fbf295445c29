"""Which picture a value has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from quire.base.errors import Unsupported
from quire.base.outputs import CompletionOutput, RequestOutput, RequestOutputs
from quire.contracts.token_views import AttentionView, ChancesView, ComparisonView, NormsView
from quire.contracts.views import HistoryView, PoolView, StateFileView
from quire_inspector.drawing.branch_tree import tree_of
from quire_inspector.drawing.chances import chances_picture, parting_picture
from quire_inspector.drawing.heat import Heat
from quire_inspector.drawing.page_maps import PageMaps
from quire_inspector.drawing.pictures import Picture
from quire_inspector.drawing.summaries import Summary, TextTable


def attention_picture(view: AttentionView) -> Heat:
    """Return the weights of one query, by head and position."""
    positions = np.arange(view.weights.shape[1], dtype=np.int64)
    rows = [str(head) for head in view.heads]
    title = f"attention of position {view.position} at layer {view.layer} ({view.kind})"
    return Heat(title, view.weights, rows, positions, "head", "weight")


def norms_picture(view: NormsView) -> Summary:
    """Return the norms of each tensor, by head and position."""
    title = f"layer {view.layer} ({view.kind}) of {view.num_tokens} tokens"
    return Summary(title, [], below=[norm_heat(view, name, None) for name in view.norms])


def norm_heat(view: NormsView, name: str, head: int | None) -> Heat:
    """Return the norms of one tensor, of one head or of all."""
    values = view.norms[name].T
    heads = list(range(len(values))) if head is None else [head]
    title = f"norms of {name} at layer {view.layer} ({view.kind})"
    return Heat(title, values[heads], [str(one) for one in heads], view.positions, "head", "norm")


def output_picture(output: RequestOutput) -> Summary:
    """Return a prompt and its continuations."""
    reused = f"{output.num_cached_tokens:,} of {len(output.prompt_token_ids):,} prompt tokens were there"
    facts = [("request", output.request_id), ("reuse", reused)]
    if output.cache_note:
        facts.append(("again", output.cache_note))
    if output.metrics.time_to_first_token is not None:
        facts.append(("first token", f"{output.metrics.time_to_first_token:.3f} s"))
    texts = [] if output.prompt is None else [("prompt", output.prompt)]
    for one in output.outputs:
        texts.append((f"output {one.index}", one.text))
        facts.append((f"output {one.index}", _ended(one)))
    return Summary("RequestOutput", facts, texts)


def outputs_picture(outputs: RequestOutputs) -> TextTable:
    """Return a row for each continuation of each prompt."""
    rows = []
    for number, output in enumerate(outputs):
        count = len(output.prompt_token_ids)
        prompt = f"{count:,} tokens" if output.prompt is None else output.prompt
        reuse = f"{output.num_cached_tokens:,} of {count:,}"
        rows += [(str(number), prompt, one.text, _ended(one), reuse) for one in output.outputs]
    return TextTable(f"{len(outputs)} outputs", ("", "prompt", "text", "ended", "reuse"), rows)


def _ended(one: CompletionOutput) -> str:
    """Return the end of a continuation, in words."""
    reason = f" by {one.stop_reason!r}" if one.stop_reason is not None else ""
    error = f": {one.error}" if one.error else ""
    return f"{len(one.token_ids):,} tokens, {one.finish_reason or 'unfinished'}{reason}{error}"


def state_file_picture(view: StateFileView) -> Summary:
    """Return a summary of a state file."""
    found, model = view.facts, view.facts["model"]
    facts = [
        ("kind", str(found["kind"])),
        ("model", str(model.get("architecture"))),
        ("bytes", f"{found['bytes']:,} in the file, {found['state_bytes']:,} of state"),
        ("checksums", str(found["checksums"])),
        ("adapters", str(found["adapters"] or "none")),
    ]
    if found["messages"] is not None:
        facts.append(("chat", f"{found['messages']:,} messages"))
    for number, one in enumerate(found["sequences"]):
        layers = "; ".join(f"{count} × {kind}" for kind, count in one["layers"].items())
        facts.append((f"sequence {number}", f"{one['num_tokens']:,} tokens; {layers}"))
    return Summary(str(found["file"]), facts)


PICTURES: Mapping[type, Callable[[Any], Picture]] = {
    ChancesView: chances_picture,
    ComparisonView: parting_picture,
    AttentionView: attention_picture,
    NormsView: norms_picture,
    HistoryView: lambda view: tree_of(view, "history"),
    PoolView: lambda view: PageMaps([view], [None]),
    RequestOutput: output_picture,
    RequestOutputs: outputs_picture,
    StateFileView: state_file_picture,
}


def picture_of(value: Any) -> Picture:
    """Return a value's picture; ``Unsupported`` for a class without any."""
    paint = PICTURES.get(type(value))
    if paint is None:
        raise Unsupported(f"a {type(value).__name__} has no picture; print it")
    return paint(value)
