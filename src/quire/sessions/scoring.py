"""Probabilities of tokens after a session."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.base.outputs import Reuse
from quire.contracts.executor import ExecutorInputs
from quire.engine.prompts import Text
from quire.engine.request_outputs import reuse_of
from quire.sessions.live_sequence import LiveSequence


def compute(live: LiveSequence, priority: int = 0, use_tqdm: bool | None = None) -> Reuse:
    """Run all tokens but the last one; return the reused ones."""
    request = live.compute("compute", priority=priority, use_tqdm=use_tqdm)
    if request is not None:
        return reuse_of(request, live.engine.tokenizer)
    computed = live.branch.computed
    return Reuse(cached=computed, by_tier={"pool": computed} if computed else {})


def logits(live: LiveSequence) -> Tensor:
    """Return the logits of the next token, float32 ``[V]``."""
    with live.engine.lock:
        branch = live.require_idle("logits")
        if not len(live):
            raise InvalidArgument("the session is empty; append at least one token to ask what comes next")
        if branch.logits is not None:
            return branch.logits.clone()
        rows: list[Tensor] = []
        request = live.engine.submit_run(
            branch, branch.tokens.ids, on_logits=lambda position, rows_RV: rows.append(rows_RV[-1].float().clone())
        )
    live.wait(request)
    # Another thread may have changed the session since.
    work = request.branch
    if branch.runs == work.runs and np.array_equal(branch.tokens.ids, work.tokens.ids):
        branch.logits = rows[-1]
    return rows[-1].clone()


def score(live: LiveSequence, text: Text) -> list[float]:
    """Return the log-probability of each token of a text, after the session and each other."""
    if isinstance(text, (Mapping, ExecutorInputs)):
        raise InvalidArgument(
            "score takes text or token ids: an embedding has no probability; append it instead", field="text"
        )
    new, _ = live.encode(text, live.branch.tokens.ids)
    with live.engine.lock:
        branch = live.require_idle("score")
        live.engine.checks.tokens(new)
        if not len(live):
            raise InvalidArgument("the session is empty; append at least one token to score what follows it")
        if not new.size:
            return []
        live.engine.checks_of(branch).length(len(live) + new.size, None)
    live.compute("score")
    with live.forked("score") as forked:
        fork = forked.branch
        # The session's last token and all scored ones but the last give the logits of the next.
        first = len(fork.tokens) - 1
        live.engine.branches.rewind(fork, first)
        scores = [0.0] * int(new.size)

        def read(position: int, rows_RV: Tensor) -> None:
            # Rows before the session's last token come if its state had to be computed again.
            rows_RV = rows_RV[max(0, first - position) :]
            start = max(0, position - first)
            wanted = torch.from_numpy(new[start : start + rows_RV.shape[0]]).to(rows_RV.device)
            picked = torch.log_softmax(rows_RV.float(), -1).gather(1, wanted.unsqueeze(1))
            scores[start : start + rows_RV.shape[0]] = picked.squeeze(1).tolist()

        tokens = np.append(fork.tokens.ids, new[:-1])
        live.wait(live.engine.submit_run(fork, tokens, on_logits=read, fresh_from=first, all_logits=True))
        return scores
