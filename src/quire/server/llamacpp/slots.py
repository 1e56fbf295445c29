"""Slots: sessions of a client under the numbers that llama-server gives its places.

Slot N of an API key is its session with the label ``slot=N``. A completion with ``id_slot`` makes
it, or takes it back to the common beginning of its tokens and the prompt, and goes on there. Saving
commits the session to the branch ``filename`` in the store; restoring checks that branch out.
"""

from __future__ import annotations

import asyncio
import time
from itertools import takewhile
from typing import Any

from quire.async_llm import AsyncSession
from quire.base.errors import InvalidArgument, NotFound
from quire.base.sampling_params import SamplingParams
from quire.server.http.context import Context
from quire.server.http.errors import ApiError, bad_field, naming
from quire.server.sessions.held import HeldSession
from quire.server.sessions.streams import ClientSessionStream

LABEL = "slot"
"""The label with a slot's number."""


def check_number(context: Context, number: int) -> None:
    """Raise ``ApiError`` 400 for a number that no slot has."""
    count = total(context)
    if not 0 <= number < count:
        raise bad_field("id_slot", f"id_slot must be in [0, {count}), or -1 for none, got {number}")


def total(context: Context) -> int:
    """Return the number of slots: as many as sequences run at a time."""
    return context.llm.config.max_num_seqs


def lock_of(context: Context, owner: str, number: int) -> asyncio.Lock:
    """Return the lock of a slot: requests for one slot wait for each other, as in llama-server."""
    return context.slot_locks.setdefault((owner, number), asyncio.Lock())


def by_number(context: Context, owner: str) -> dict[int, HeldSession]:
    """Return the sessions of an owner's slots; empty ones have none."""
    marked = [(held.session.labels.get(LABEL, ""), held) for held in context.sessions.of(owner)]
    return {int(label): held for label, held in marked if label.isascii() and label.isdecimal()}


async def hold(context: Context, owner: str, number: int, session: AsyncSession) -> str:
    """Make a new session that of a slot, in its ``room``, and return its id."""
    sessions = context.sessions
    lifetime = sessions.lifetime(None, pinned=session.pinned)
    labels = {LABEL: str(number)}
    (made,) = await sessions.hold(owner, [session], ttl=lifetime, name=f"slot {number}", labels=labels)
    return made


# -- completions -----------------------------------------------------------------------------------


async def begun(
    context: Context,
    owner: str,
    number: int,
    params: SamplingParams,
    ids: list[int],
    *,
    adapter: str | None,
    salt: str | None,
    afresh: bool,
) -> tuple[ClientSessionStream, int]:
    """Run the prompt ``ids`` in a slot. Return the generation behind it, at whose end the slot is
    free again, and the number of tokens whose state was there. ``afresh``: use none of it."""
    lock = lock_of(context, owner, number)
    await lock.acquire()
    stream: ClientSessionStream | None = None
    try:
        held = by_number(context, owner).get(number)
        if held is not None and (afresh or held.session.adapter != adapter):
            await context.sessions.close(owner, held.id)
            held = None
        if held is not None:
            session_id = held.id
        else:
            with context.sessions.room(owner):
                session = await context.llm.session([], adapter=adapter, cache_salt=salt)
                session_id = await hold(context, owner, number, session)
        stream = ClientSessionStream(context, owner, session_id, params, freed=lock.release)
        return stream, await _fill(await stream.take(), ids)
    except BaseException:
        if stream is None:
            lock.release()
        else:
            await asyncio.shield(stream.aclose())
        raise


async def _fill(session: AsyncSession, ids: list[int]) -> int:
    """Make a session hold ``ids``, and return the number of those whose state was there."""
    there = session.tokens
    kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(there, ids, strict=False)))
    if kept < len(there):
        await session.rewind(to=kept)
    found = session.num_computed
    if kept and found < kept - 1:
        # A restored slot, and one whose pages were given up, find their state in the store.
        found = max(found, (await session.compute()).cached)
    if kept < len(ids):
        await session.append(ids[kept:])
    # The logits behind the last token are computed in any case.
    return min(found, kept, len(ids) - 1)


# -- /slots ----------------------------------------------------------------------------------------


async def listed(context: Context, owner: str) -> list[dict[str, Any]]:
    """Describe the slots. Requests that name none count in the first free ones."""
    status = await context.llm.read(lambda llm: llm.status())
    held = by_number(context, owner)
    others = status["num_requests_running"] - sum(one.busy is not None for one in held.values())
    found = []
    for number in range(total(context)):
        one = held.get(number)
        busy = one is not None and one.busy is not None
        if one is None and others > 0:
            busy, others = True, others - 1
        slot = {
            "id": number,
            "id_task": -1,
            "n_ctx": context.longest,
            "speculative": context.llm.config.speculative is not None,
            "is_processing": busy,
        }
        found.append(slot if one is None else {**slot, "session_id": one.id, "num_tokens": len(one.session)})
    return found


async def save(context: Context, owner: str, number: int, filename: str) -> dict[str, Any]:
    """Commit a slot's session to the branch ``filename``."""
    began = time.monotonic()
    async with lock_of(context, owner, number):
        held = by_number(context, owner).get(number)
        if held is None:
            raise ApiError(
                404, f"slot {number} is empty; POST /completion with id_slot={number} fills it", code="not_found"
            )
        async with context.sessions.use(owner, held.id, "commit"):
            with naming({"name": "filename"}, "filename", (InvalidArgument,)):
                made = await held.session.commit(filename, force=True, owner=owner)
    return {
        "id_slot": number,
        "filename": filename,
        "n_saved": made.num_tokens,
        "n_written": made.nbytes,
        "timings": {"save_ms": _since(began)},
    }


async def restore(context: Context, owner: str, number: int, filename: str) -> dict[str, Any]:
    """Make a slot's session go on from the branch ``filename``."""
    began = time.monotonic()
    async with lock_of(context, owner, number):
        with naming({"name": "filename"}, "filename", (InvalidArgument, NotFound)):
            session = await context.llm.checkout(filename, owner=owner)
        try:
            if (before := by_number(context, owner).get(number)) is not None:
                await context.sessions.close(owner, before.id)
            with context.sessions.room(owner):
                await hold(context, owner, number, session)
        except BaseException:
            await asyncio.shield(session.close())
            raise
    return {
        "id_slot": number,
        "filename": filename,
        "n_restored": len(session),
        "n_read": (await context.llm.log(filename, owner=owner))[0].nbytes,
        "timings": {"restore_ms": _since(began)},
    }


async def erase(context: Context, owner: str, number: int) -> dict[str, Any]:
    """Close a slot's session."""
    async with lock_of(context, owner, number):
        erased = 0
        if (held := by_number(context, owner).get(number)) is not None:
            erased = len(held.session)
            await context.sessions.close(owner, held.id)
    return {"id_slot": number, "n_erased": erased}


def _since(began: float) -> float:
    return round(1000 * (time.monotonic() - began), 3)
