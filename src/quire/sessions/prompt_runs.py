"""Prompts of an LLM, run to their outputs."""

from __future__ import annotations

from collections.abc import Sequence

from quire.base.config import check_int
from quire.base.errors import InvalidArgument
from quire.base.interrupts import SHIELD
from quire.base.outputs import BeamSearchOutput, RequestOutput, WarmedSegment
from quire.base.progress import Bar, on_terminal
from quire.blend.calibration import BlendCalibration, QualityLimits
from quire.engine import beam
from quire.engine.progress_bars import generation_bar
from quire.engine.prompts import SegmentedPrompt, Text, naming_prompt
from quire.engine.request import Request
from quire.engine.request_outputs import warmed
from quire.sessions import blend_calibration
from quire.sessions.preparation import RequestPreparation
from quire.sessions.prompts import PreparedPrompts


def run(prepared: PreparedPrompts, requests: RequestPreparation, use_tqdm: bool | None) -> list[RequestOutput]:
    """Run prompts; return their outputs. Signals take effect between steps. Only this part of
    ``LLM.generate`` is shielded: they may end the checks before it at any line."""
    with SHIELD:
        engine = requests.engine
        submitted: list[list[Request]] = []
        prepared.require_kept()
        try:
            submitted = requests.submit(prepared)
            samples = [sample for samples in submitted for sample in samples]
            with generation_bar(engine, submitted, use_tqdm) as on_step:
                engine.run(samples, on_step)
            engine.run([one.output.verification for one in samples if one.output.verification is not None])
        finally:
            for samples in submitted:
                engine.end(samples)
        prepared.keep_sessions()
        return requests.outputs(prepared, submitted)


def warm(
    submitted: Sequence[tuple[int, Sequence[Request]]], requests: RequestPreparation, use_tqdm: bool | None
) -> list[WarmedSegment]:
    """Compute the chunks of segments; return the kept tokens of each."""
    runs = [request for _, runs in submitted for request in runs]
    try:
        with generation_bar(requests.engine, [[one] for one in runs], use_tqdm) as on_step:
            requests.engine.run(runs, on_step)
    finally:
        requests.engine.end(runs)
    return warmed(submitted)


def search(
    searches: Sequence[beam.BeamSearch],
    texts: Sequence[str | None],
    requests: RequestPreparation,
    use_tqdm: bool | None,
) -> list[BeamSearchOutput]:
    """Run searches to their ends; return their outputs."""
    show = use_tqdm if use_tqdm is not None else (len(searches) > 1 and on_terminal())
    with Bar(total=len(searches), desc="Searching", unit="prompt", disable=not show) as bar:

        def advance() -> None:
            bar.update(sum(one.done for one in searches) - bar.n)

        with SHIELD:
            beam.search(requests.engine, searches, advance if show else None)
    return [one.output(text) for one, text in zip(searches, texts, strict=True)]


def calibrate(
    requests: RequestPreparation,
    texts: Sequence[Text | SegmentedPrompt] | None,
    probes: int,
    limits: QualityLimits | None,
    use_tqdm: bool | None,
) -> BlendCalibration:
    """Check the arguments of a calibration, and run it."""
    engine, chosen = requests.engine, QualityLimits() if limits is None else limits
    engine.blending.require()
    check_int("probes", probes, 1)
    if not isinstance(chosen, QualityLimits):
        raise InvalidArgument(field="limits", given=limits, allowed="QualityLimits or None")
    if texts is not None and (isinstance(texts, str) or not isinstance(texts, Sequence) or not texts):
        raise InvalidArgument(field="texts", given=texts, allowed="a list of texts, at least one, or None")
    show = on_terminal() if use_tqdm is None else use_tqdm
    given = []
    for number, text in enumerate(texts or ()):
        with naming_prompt(number, len(texts or ())):
            ids, _, pieces = requests.read(text, None)
            engine.checks.tokens(ids)
        given.append((ids, pieces))
    return blend_calibration.calibrate_on(engine, None if texts is None else given, probes, chosen, show=show)
