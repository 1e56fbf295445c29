"""The page at ``/``: static files of the package, the same for everybody, so without a key."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.http.errors import ApiError

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parents[1] / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".webmanifest": "application/manifest+json",
}
"""Media types; other files are texts."""
POLICY = "; ".join(
    (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@router.head("/")
@router.get("/")
async def page(request: Request) -> Response:
    """Return the page."""
    return _file(request, "index.html")


@router.head("/inspector/{path:path}")
@router.get("/inspector/{path:path}")
async def asset(request: Request, path: str) -> Response:
    """Return a file of the page; 404 for any other path."""
    return _file(request, path)


def _file(request: Request, path: str) -> Response:
    if path not in _files():
        raise ApiError(404, f"the page has no file {path[:80]!r}", code="not_found")
    body, tag = _content(path)
    headers = {**HEADERS, "etag": tag}
    if tag in (one.strip() for one in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    kind = TYPES.get(Path(path).suffix, "text/plain; charset=utf-8")
    return Response(body, headers={**headers, "content-type": kind})


@cache
def _files() -> frozenset[str]:
    """Return the paths of all files, below the folder: no other can be asked for."""
    return frozenset(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())


@cache
def _content(path: str) -> tuple[bytes, str]:
    """Return a file and its tag."""
    body = (FOLDER / path).read_bytes()
    return body, f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
