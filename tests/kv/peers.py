"""Two ends of a hand-over of sequence 1, and a process that is one of them."""

from __future__ import annotations

import torch
from tests.kv.transfers import begun, made, run

from quire.channels.greeting import Trust
from quire.channels.urls import connect
from quire.contracts.channel import Channel
from quire.kv.contract import ContractState
from quire.kv.messages import opened

TRUST = Trust(b"a secret of both ends")
TOKENS = 40


def compute(state: ContractState, kind: str, chunk: int) -> None:
    """Run the tokens of sequence 1, ``chunk`` of them at a time."""
    for start in range(0, TOKENS, chunk):
        run(state, kind, 1, min(chunk, TOKENS - start))


def send(state: ContractState, kind: str, chunk: int, channel: Channel) -> None:
    """Send sequence 1, which is computed meanwhile."""
    begun(state, kind, 1)
    offer = channel.receive()
    assert offer is not None
    header, _ = opened(offer)
    state.state.parts.offers.setdefault(channel, []).append(header)
    state.disagg_mark_send(1, 0, header["map"], channel)
    compute(state, kind, chunk)
    state.disagg_wait(1, 20)


def receive(state: ContractState, kind: str, channel: Channel) -> None:
    """Receive sequence 1."""
    begun(state, kind, 1)
    state.disagg_prepare_recv(1, TOKENS, channel=channel)
    state.disagg_wait(1, 20)


def peer(url: str, sends: bool, kind: str, chunk: int) -> None:
    """Send to the process that listens, or receive from it."""
    torch.set_num_threads(1)
    state, end = made(kind, 3), connect(url, TRUST)
    if sends:
        send(state, kind, chunk, end)
    else:
        receive(state, kind, end)
    end.close()
