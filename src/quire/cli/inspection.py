"""Descriptions of state files and rule tables, for people and as JSON."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.base.errors import DataLoss, InvalidArgument
from quire.base.segments import DEFAULT_RATIO
from quire.blend.calibration import BlendCalibration
from quire.cli.tables import folding_table, print_tables
from quire.contracts.views import StateFileView
from quire.kv.rule_table import Cell, Combination, rules_of, tables
from quire.kv.rule_text import as_markdown, as_text
from quire.statefile.container import read_state
from quire.statefile.schema import check_metadata


def describe(path: str | Path) -> StateFileView:
    """Return the content of a state file, to be drawn or read. Errors: those of ``facts_of``, and
    ``InvalidArgument`` unless ``path`` is a file name."""
    if not isinstance(path, (str, Path)) or not str(path):
        raise InvalidArgument(field="path", given=path, allowed="the name of a state file")
    return StateFileView(facts_of(Path(path)))


def facts_of(path: Path) -> dict[str, Any]:
    """Return a state file's content in JSON types, with checksums and metadata verified. Raise
    errors of ``read_state``, and ``InvalidArgument`` for an unknown kind of file."""
    with read_state(path) as file:
        check_metadata(file.metadata)
        metadata: Mapping[str, Any] = file.metadata
        return {
            "file": str(path),
            "kind": metadata["kind"],
            "bytes": path.stat().st_size,
            "state_bytes": file.nbytes,
            "tensors": len(file.names),
            "checksums": "verified",
            "model": metadata["model"],
            "adapters": metadata["adapters"],
            "exact": metadata.get("exact"),
            "exact_tokens": metadata.get("exact_tokens"),
            "modified": metadata.get("modified"),
            "messages": metadata.get("chat"),
            "sequences": [_sequence(tokens, sequence) for tokens, sequence in _rows(metadata, path)],
        }


def _rows(metadata: Mapping[str, Any], path: Path) -> list[tuple[list[int], Mapping[str, Any]]]:
    """Return each sequence's tokens ([] if unknown) and state ({} if it has none)."""
    if metadata["kind"] == "session":
        return [(metadata["tokens"], metadata["sequence"] or {})]
    sequences, tokens = metadata["rows"], metadata["tokens"]
    if len(sequences) != len(tokens):
        raise DataLoss(f"state file {str(path)!r} holds {len(sequences)} sequences, and tokens of {len(tokens)}")
    return [(ids or [], sequence) for ids, sequence in zip(tokens, sequences, strict=True)]


def _sequence(tokens: list[int], sequence: Mapping[str, Any]) -> dict[str, Any]:
    layers, recurrent = sequence.get("layers", []), sequence.get("recurrent", [])
    kinds = Counter([*map(_rows_of, layers), *map(_states_of, recurrent)])
    return {
        "num_tokens": len(tokens),
        "first_tokens": tokens[:16],
        # Ranges of positions with rows in the layers of one class.
        "positions_held": [
            {"layers": one["layers"], "ranges_start_stop": one["ranges"]} for one in sequence.get("held", [])
        ],
        "num_layers": len(layers) + len(recurrent),
        "layers": dict(kinds),
        "rope": sorted({layer["rope_fingerprint"] for layer in layers if layer["rope_fingerprint"]}),
        "window": sequence.get("window"),
        "sink": sequence.get("sink"),
        "kept_recurrent_positions": sequence.get("kept_recurrent_positions", []),
        "encoder_rows": {one["layer"]: one["rows"] for one in sequence.get("cross", [])},
    }


def _rows_of(layer: Mapping[str, Any]) -> str:
    """Describe an attention layer's state per token."""
    if layer["kind"] == "latent":
        kept = f"rows of {layer.get('row_dim')}, values of {layer['value_dim']}"
    else:
        kept = f"{layer.get('num_kv_heads')} KV heads of {layer.get('head_dim')}/{layer['value_dim']}"
    window = "" if layer["window"] is None else f" of {layer['window']}"
    return f"{layer['kind']}{window}, {kept}, {layer['dtype']}"


def _states_of(layer: Mapping[str, Any]) -> str:
    """Describe a recurrent layer's state per position."""
    shapes = (f"{'x'.join(map(str, one['shape']))} {one['dtype']}" for one in layer["states"])
    return f"recurrent, states of {' and '.join(shapes)}"


def print_description(found: Mapping[str, Any]) -> None:
    """Print tables on stdout."""
    model = found["model"]
    config, weights = (str(model.get(name))[:16] for name in ("config", "weights"))
    length = [model["length"]] if "length" in model else []
    rows = [
        ("kind", found["kind"]),
        ("model", ", ".join([f"{model.get('architecture')}, config {config}, weights {weights}", *length])),
        ("adapters", found["adapters"] or "none"),
        ("state", _origin(found)),
        ("bytes", f"{found['bytes']:,} in the file, {found['state_bytes']:,} of state in {found['tensors']} tensors"),
        ("checksums", found["checksums"]),
    ]
    if found["messages"] is not None:
        rows.append(("chat", f"{found['messages']:,} messages"))
    for number, sequence in enumerate(found["sequences"]):
        window = "" if sequence["window"] is None else f", window {sequence['window']} with sink {sequence['sink']}"
        rows.append((f"sequence {number}", f"{sequence['num_tokens']} tokens{window}"))
        rows += [("", line) for line in _lines_of(sequence)]
    print_tables(folding_table("", "", rows=rows, box=None, show_header=False, title=str(found["file"])))


def _origin(found: Mapping[str, Any]) -> str:
    """Describe the exactness of a state for its tokens; in a KV cache row by row."""
    if found["kind"] == "session":
        return _origin_of(found["exact"], found["exact_tokens"], found["modified"])
    count = len(found["sequences"])
    usual = {"exact": True, "exact_tokens": None, "modified": False}
    describe = list(map(_origin_of, *(found[name] or [value] * count for name, value in usual.items())))
    return describe[0] if len({*describe}) == 1 else ", ".join(f"row {row} {one}" for row, one in enumerate(describe))


def _origin_of(exact: bool, exact_tokens: int | None, modified: bool) -> str:
    if not exact:
        return f"approximate from token {exact_tokens} on" if exact_tokens else "approximate"
    return "modified by hand" if modified else "exact"


def _lines_of(sequence: Mapping[str, Any]) -> Iterator[str]:
    """Yield the facts about a sequence besides its length, in words."""
    for one in sequence["positions_held"]:
        ranges = [f"{start}..{stop - 1}" for start, stop in one["ranges_start_stop"] if stop > start]
        layers = "all layers" if len(one["layers"]) == sequence["num_layers"] else f"{len(one['layers'])} layers"
        yield f"positions held by {layers}: {', '.join(ranges) or 'none'}"
    if any(kind.startswith("recurrent") for kind in sequence["layers"]):
        kept = "".join(f", at {position}" for position in sequence["kept_recurrent_positions"])
        yield f"recurrent states kept: at the end{kept}"
    for layer, rows in sequence["encoder_rows"].items():
        yield f"rows of the encoder in layer {layer}: {'none were set' if rows is None else rows}"
    yield f"first tokens {sequence['first_tokens']}"
    for kind, count in sequence["layers"].items():
        yield f"{count} layers: {kind}"


_TOLD = {
    "supports_speculative_decoding": " (by executors; generate, chat and serve take --speculative)",
    "memory_requirements": " (kv_cache_memory_per_token is that of one layer)",
}
"""Additions to the names of capabilities, for people."""


def print_capabilities(found: Mapping[str, Any], own: Combination, *, as_json: bool) -> None:
    """Print ``LLM.capabilities`` and the rules of the model's own combination of layers."""
    executor = None if found["executor"] is None else dataclasses.asdict(found["executor"])
    rules = rules_of(own)
    if as_json:
        describe = {name: found[name] for name in ("verbs", "engine_verbs", "engine", "notes", "blend_calibration")}
        every = {title: {name: _as_json(cells) for name, cells in rows.items()} for title, rows in tables().items()}
        own_rules = {name: _as_json(cells) for name, cells in rules.items()}
        whole = {"executor": executor, **describe, "rules": {"kinds": own.kinds, **own_rules, "tables": every}}
        print(json.dumps(whole, default=str))
        return
    for note in found["notes"]:
        print(note)
    if not found["engine_verbs"]["blending"]:
        document = found["blend_calibration"]
        print(f"blending: {calibration_line(None if document is None else BlendCalibration.read(document))}")
    if executor is not None:
        facts = [(name, _plain(value) + _TOLD.get(name, "")) for name, value in executor.items() if name != "refusals"]
        print_tables(folding_table("capability", "value", title="Executor", rows=facts))
    uses = rules["uses"]
    uses |= {name: Cell(why) for name, why in found["engine_verbs"].items() if why or name not in uses}
    kinds = " and ".join(own.kinds)
    for title, cells in (("KV state", rules["state"]), ("Model, sessions, executor", uses)):
        rows = [(name, "exact" if one.works else "no", one.reason or one.note) for name, one in cells.items()]
        print_tables(folding_table("verb", "", "how, or why not", title=f"{title}, over {kinds} layers", rows=rows))
    refusals = [*(executor["refusals"] if executor is not None else ()), *found["engine"].items()]
    print_tables(folding_table("asked for", "why not", title="Refused by executor and engine", rows=refusals))
    print("quire capabilities --all prints the table for every kind of model.")


def calibration_line(found: BlendCalibration | None) -> str:
    if found is None:
        return "not calibrated (quire calibrate, or LLM.calibrate_blending)"
    usual = found.at(DEFAULT_RATIO)
    verdict = "on" if usual.passes(found.limits) else "off"
    return f"{verdict}, checked at layer {found.layer}; {found.describe(usual)}"


def print_calibration(found: BlendCalibration, *, kept: bool, as_json: bool) -> None:
    """Print the result of ``LLM.calibrate_blending``."""
    if as_json:
        print(json.dumps(found.document() | {"kept": kept}))
        return
    rows = [
        (
            one.layer,
            f"{one.ratio:g}",
            f"{one.mean_kl:.3g}",
            f"{one.agreement:.1%}",
            f"{one.worst_agreement:.0%}",
            f"{one.equal_texts:.0%}",
            f"{one.cost:.2f}",
        )
        for one in found.qualities
    ]
    columns = (
        "check layer",
        "ratio",
        "mean KL (nats)",
        "top token agrees",
        "in the worst probe",
        "equal texts",
        "cost",
    )
    print_tables(folding_table(*columns, rows=rows, title="Blended answers beside full computations"))
    print(f"blending: {calibration_line(found)}")
    if found.sampled:
        print("The model wrote these probes; texts like those of its use (--texts) tell more.")
    print("kept in the store" if kept else "not kept; give --state-dir or --store for later processes to use it")


def print_rules(*, markdown: bool) -> None:
    """Print the whole rule table as the page ``docs/rules.md``, or for this terminal's width."""
    print(rules_page() if markdown else as_text(shutil.get_terminal_size().columns) + "\n", end="")


def rules_page() -> str:
    """Return the text of ``docs/rules.md``."""
    from quire.engine.abilities import ENGINE_REFUSALS

    return as_markdown(ENGINE_REFUSALS)


def _as_json(cells: Mapping[str, Cell]) -> dict[str, dict[str, Any]]:
    return {name: cell.as_json() for name, cell in cells.items()}


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {count:,}" for name, count in value.items())
    return "yes" if value is True else "no" if value is False else str(value)
