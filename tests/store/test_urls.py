"""URLs of tiers: each that is none says what would be one, and repeats no password."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from quire.base.errors import InvalidArgument, QuireError, Unsupported
from quire.store.files import FileTier
from quire.store.urls import ACCEPTED, open_tiers


@pytest.mark.parametrize(
    ("url", "kind", "label", "capacity"),
    [
        ("memory://4GiB", "memory", "memory", 4 << 30),
        ("memory://1.5 GB", "memory", "memory", 1_500_000_000),
        ("memory://4096", "memory", "memory", 4096),
        ("file:///var/quire", "disk", "directory '/var/quire'", None),
        ("file:///var/a%20b?size=200GiB", "disk", "directory '/var/a b'", 200 << 30),
        ("redis://host", "redis", "redis://host:6379/0", None),
        ("redis://host:7/2?size=8GiB", "redis", "redis://host:7/2", 8 << 30),
        ("rediss://user:p%40ss@host/1", "redis", "rediss://host:6379/1", None),
        ("redis://:p@host", "redis", "redis://host:6379/0", None),
        ("s3://bucket/prefix", "object", "s3://bucket/prefix", None),
        ("gs://bucket", "object", "gs://bucket", None),
        ("az://container", "object", "az://container", None),
    ],
)
def test_urls(monkeypatch: pytest.MonkeyPatch, url: str, kind: str, label: str, capacity: int | None) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    (tier,) = open_tiers(url)
    assert (tier.kind, tier.label, getattr(tier, "capacity", None)) == (kind, label, capacity)


def test_several() -> None:
    tiers = open_tiers(["memory://1KiB", "file:///a", "redis://b"])
    assert [tier.kind for tier in tiers] == ["memory", "disk", "redis"]
    assert isinstance(tiers[1], FileTier)
    assert open_tiers([]) == []


def test_a_password_reaches_its_server() -> None:
    (tier,) = open_tiers("redis://user:p%40ss@host:7/1?size=1GiB")
    options: dict[str, Any] = tier._client.connection_pool.connection_kwargs  # type: ignore[attr-defined]
    assert {name: options[name] for name in ("username", "password", "host", "port", "db")} == {
        "username": "user",
        "password": "p@ss",
        "host": "host",
        "port": 7,
        "db": 1,
    }


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "it has no scheme"),
        ("/var/quire", "it has no scheme"),
        ("ftp://host", "no tier of scheme 'ftp'"),
        ("memory://", "the size stands behind memory://"),
        ("memory:///4GiB", "the size stands behind memory://"),
        ("memory://?size=4GiB", "the size stands behind memory://"),
        ("memory://4G", "units: "),
        ("memory://0", "at least 1 byte"),
        ("memory://much", "units: "),
        ("file://relative/path", "three slashes"),
        ("file:relative", "three slashes"),
        ("file:///", "three slashes"),
        ("file:///a?size=", "units: "),
        ("file:///a?size=0", "at least 1 byte"),
        ("file:///a?size", "not NAME=VALUE"),
        ("file:///a?size=1&size=2", "given twice"),
        ("file:///a?sizes=1GiB", "no parameter 'sizes'"),
        ("file:///a#b", "fragment"),
        ("file:///a%00b", "control characters"),
        ("file:///a\nb", "control characters"),
        ("redis://", "a host is needed"),
        ("redis://host/name", "a database is a number"),
        ("redis://host/1/2", "a database is a number"),
        ("redis://host:port", "its port is none"),
        ("redis://host:99999", "its port is none"),
        ("redis://[::1", "it is no URL"),
        ("s3://", "a name is needed"),
        ("s3:///key", "a name is needed"),
        ("s3://bucket?size=1GiB", "lifecycle rules"),
        ("s3://key:very-secret@bucket", "takes no user and no password"),
        ("redis://user:very-secret@host:port", "its port is none"),
        ("redis://user:very-secret@/0", "a host is needed"),
        ("redis://host?password=very-secret", "no parameter 'password'"),
        ("user:very-secret@host", "no tier of scheme 'user'"),
        ("//user:very-secret@host", "it has no scheme"),
        ("redis//user:very-secret@host", "it has no scheme"),
        ("x:very@secret://host", "no tier of scheme 'x'"),
    ],
)
def test_what_is_no_url(url: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        open_tiers(["memory://1", url])
    told = str(caught.value)
    assert words in told
    assert caught.value.field == "store"
    assert all(form in told for form in ACCEPTED.values())
    assert "secret" not in f"{told} {caught.value.given}"


def test_what_is_no_text() -> None:
    with pytest.raises(InvalidArgument, match=r"store must be one of memory://4GiB, .* got 3"):
        open_tiers([3])  # type: ignore[list-item]


def test_an_account_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ACCOUNT_NAME", "ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidArgument, match=r"az://container: .*Account must be specified"):
        open_tiers("az://container")


@pytest.mark.parametrize(("url", "package"), [("redis://host", "redis"), ("s3://bucket", "obstore")])
def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch, url: str, package: str) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(Unsupported, match=rf"{package}: pip install 'quire\[store\]'") as caught:
        open_tiers(url)
    assert isinstance(caught.value, QuireError)
    assert caught.value.field == "store"
