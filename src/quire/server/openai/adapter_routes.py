"""Loading and unloading of adapters under vLLM's paths, from allowed directories only."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import APIRouter, Request
from pydantic import BaseModel, StrictStr

from quire.base.errors import AlreadyExists, QuireError
from quire.models.catalogue import ADAPTER_FILES, ADAPTER_TEXTS, bundled_adapters
from quire.server.http.bodies import BodyRoute, BoundedModel
from quire.server.http.context import Context, context_of
from quire.server.http.errors import ApiError, api_error, bad_field, hiding
from quire.server.http.status import ModelCard, adapter_card

router = APIRouter(route_class=BodyRoute, tags=["adapters"])

MAX_NAME = 256
"""Most characters of an adapter's name."""


class UnloadAdapterRequest(BoundedModel):
    """A LoRA adapter to unload."""

    lora_name: StrictStr


class LoadAdapterRequest(UnloadAdapterRequest):
    """A LoRA adapter to load."""

    lora_path: StrictStr


class Unloaded(BaseModel):
    """The adapter is not loaded any more."""

    id: str
    deleted: bool = True


@router.post("/v1/load_lora_adapter")
async def load_adapter(request: Request, body: LoadAdapterRequest) -> ModelCard:
    """Load a bundled adapter or one from an allowed directory. Requests name it as their model."""
    context = context_of(request)
    name = body.lora_name
    if not name.strip() or not name.isprintable() or len(name) > MAX_NAME:
        raise bad_field("lora_name", f"lora_name must be 1 to {MAX_NAME} printable characters, got {name[:40]!r}")
    if name in context.base_names:
        raise api_error(AlreadyExists(f"{name!r} is the name of the base model; take another"), param="lora_name")
    path = await asyncio.to_thread(allowed_path, body.lora_path, context.settings.adapter_dir)
    async with _place(context, request.state.owner):
        try:
            with hiding(path, body.lora_path):
                info = await context.llm.load_adapter(name, path)
        except AlreadyExists as error:
            raise api_error(error, param="lora_name") from error
        context.adapters.setdefault(info.owner, set()).add(name)
    return adapter_card(context, info)


@asynccontextmanager
async def _place(context: Context, owner: str) -> AsyncIterator[None]:
    """Hold a place for one more adapter of a key while it is loaded. Raise ``ApiError`` 429 if it
    has as many as it may have. Those of the start count for no key."""
    most = context.settings.max_adapters_per_key
    start = set() if owner else set(context.llm.config.adapters or ())
    loaded = [info for info in (await context.refresh_adapters()).values() if info.owner == owner]
    own = len({info.name for info in loaded} - start) + context.loading[owner]
    if own >= most:
        message = (
            f"{own} adapters are loaded{' with this key' if owner else ''}, and at most {most} may be; unload one first"
        )
        raise ApiError(429, message, param="lora_name", code="adapter_limit")
    context.loading[owner] += 1
    try:
        yield
    finally:
        context.loading[owner] -= 1


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(request: Request, body: UnloadAdapterRequest) -> Unloaded:
    """Unload an adapter. 409 while requests or sessions use it."""
    context = context_of(request)
    try:
        await context.llm.unload_adapter(body.lora_name)
    except QuireError as error:
        raise api_error(error, param="lora_name") from error
    context.adapters.get(request.state.owner, set()).discard(body.lora_name)
    return Unloaded(id=body.lora_name)


def allowed_path(given: str, folders: Sequence[Path]) -> Path:
    """Return the directory of an adapter that may be loaded: a bundled one, or one in ``folders``.

    The directory and the files that are read lie in ``folders`` after all links are followed.
    Relative paths begin in ``folders``, in their order. Raise ``ApiError`` 404 for missing paths
    inside, and 403 for all others, whether they exist or not.
    """
    if given in (bundled := bundled_adapters()):
        return bundled[given]
    roots = [Path(os.path.realpath(folder)) for folder in folders]
    inside = [path for path in _candidates(given, roots) if _is_inside(path, roots)]
    path = next((path for path in inside if os.path.isdir(path)), None)
    if path is not None and all(_is_inside(Path(os.path.realpath(file)), roots) for file in _read_of(path)):
        return path
    if inside and path is None:
        raise ApiError(404, f"there is no adapter {given[:200]!r}", param="lora_path", code="not_found")
    raise ApiError(
        403,
        f"lora_path {given[:200]!r} is neither a bundled adapter nor inside of a directory from which this server loads any "
        "(its option --adapter-dir)",
        param="lora_path",
        code="not_allowed",
    )


def _candidates(given: str, roots: Sequence[Path]) -> list[Path]:
    """Return the path with links followed; an empty list if no file can have such a path."""
    try:
        os.fsencode(given)
    except UnicodeEncodeError:
        return []
    if not given or "\0" in given or ".." in Path(given).parts:
        return []
    return [Path(os.path.realpath(root / given)) for root in roots]


def _read_of(path: Path) -> Iterator[Path]:
    """Yield the files that loading an adapter may read."""
    yield from (path / file for file in ADAPTER_FILES)
    for pattern in (*ADAPTER_TEXTS, "config.json", "generation_config.json"):
        yield from path.glob(pattern)


def _is_inside(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)
