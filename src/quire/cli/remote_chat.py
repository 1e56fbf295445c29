"""``quire chat --url``: the terminal chat with a server, in whose sessions the conversations are.

The commands are those of ``quire chat``. Files are saved and loaded on the client's side. Sessions
are deleted at the end.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from quire.base.errors import InvalidArgument, NotFound, QuireError
from quire.base.sampling_fields import Surface, declarations_on
from quire.base.sampling_params import SamplingParams
from quire.cli.chat import ANSWER_TOKENS, AnswerPiece, TerminalChat, TypedTurn, messages_of, question, usual_fields
from quire.cli.client import (
    DONE,
    BrokenAnswer,
    EventParser,
    HttpFailure,
    ServerAddress,
    check_key,
    event_object,
    failure,
)
from quire.statefile.atomic_file import check_regular

if TYPE_CHECKING:
    from quire.sessions.session import Session
    from quire.store.commits import SessionCommit

PATIENCE = 5.0
"""Seconds for which calls are repeated on a session whose stream was just broken off."""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class Link:
    """Calls to a server, one connection each. Errors: ``HttpFailure``, ``BrokenAnswer``, and
    ``QuireError`` if it cannot be reached."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        """Check the address and the key. ``timeout``: seconds to wait for a byte of the server."""
        if not timeout > 0:
            raise InvalidArgument(f"timeout {timeout}; seconds above 0 are accepted")
        self.address = ServerAddress.parse(url)
        self._timeout = timeout
        self._headers = {"User-Agent": "quire", "Accept": "*/*"}
        if check_key(api_key) is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield an answer of status below 400, to be read inside the block."""
        address = self.address
        protocol = http.client.HTTPSConnection if address.tls else http.client.HTTPConnection
        with closing(protocol(address.host, address.port, timeout=self._timeout)) as connection:
            try:
                connection.connect()
            except OSError as error:
                reason = error.strerror or str(error) or type(error).__name__
                raise QuireError(f"no server can be reached at {address.authority}: {reason}") from error
            try:
                # A server that refuses a large body may answer and close before it has all of it.
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.request(method, address.prefix + path, body, {**self._headers, **(headers or {})})
                response = connection.getresponse()
                if response.status >= 400:
                    raise failure(response.status, response.read())
                yield response
            except TimeoutError as error:
                raise QuireError(f"the server did not answer within {self._timeout:g} s") from error
            except (http.client.HTTPException, ConnectionError) as error:
                if isinstance(error, QuireError):
                    raise
                raise BrokenAnswer("the server closed the connection before the answer was complete") from error

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a JSON object and return the one in the answer."""
        data = None if body is None else json.dumps(body).encode()
        return self._object(method, path, data, {"Content-Type": "application/json"} if data else {})

    def _object(self, method: str, path: str, data: Any, headers: Mapping[str, str]) -> dict[str, Any]:
        with self._answer(method, path, data, headers) as response:
            found = response.read()
        try:
            value = json.loads(found) if found else {}
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise BrokenAnswer(f"{method} {path} answered with no JSON object: {found[:200]!r}")
        return value

    def numbers(self, path: str) -> dict[str, float]:
        """Return the values without labels of a page of metrics in Prometheus' text format."""
        return {name: value for name, value in self.samples(path).items() if "{" not in name}

    def samples(self, path: str) -> dict[str, float]:
        """Return all values of such a page, by name and labels as they are written."""
        with self._answer("GET", path) as response:
            lines = response.read().decode("utf-8", "replace").splitlines()
        # A label's value may hold spaces; the number is behind the last one.
        pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in pairs if _is_number(value)}

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the objects of a stream. Closing the iterator hangs up and cancels the request."""
        parser = EventParser()
        data = json.dumps(body).encode()
        with self._answer("POST", path, data, {"Content-Type": "application/json"}) as response:
            while piece := response.read1(65536):
                for event in parser.feed(piece):
                    if event == DONE:
                        return
                    yield event_object(event)
        raise BrokenAnswer("the stream ended without [DONE]")

    def download(self, path: str, to: Path) -> None:
        """Write an answer's body to a file, whole or not at all. Raise ``NotFound`` for a missing
        directory."""
        check_regular(to, f"state file {str(to)!r}", may_be_missing=True)
        with (
            self._answer("GET", path) as response,
            tempfile.NamedTemporaryFile(dir=to.parent, prefix=to.name, delete=False) as file,
        ):
            try:
                shutil.copyfileobj(response, file, 1 << 20)
                if response.length:  # http.client ends such a body in silence
                    raise BrokenAnswer(f"the server closed the connection, {response.length} bytes before the end")
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, to)
            except BaseException:
                os.unlink(file.name)
                raise

    def upload(self, path: str, source: Path) -> dict[str, Any]:
        """Send a file and return the answer's object. Raise ``NotFound`` for a missing file."""
        if not source.is_file():
            raise NotFound(f"file {str(source)!r} does not exist")
        with open(source, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
            return self._object("POST", path, file, headers)


class RemoteModel:
    """The part of ``LLM`` that a chat needs, over HTTP."""

    def __init__(self, link: Link, name: str | None = None) -> None:
        """Find the model on the server. ``name``: by default the first one listed."""
        self.link = link
        if name is None:
            listed = link.call("GET", "/v1/models").get("data") or []
            if not listed:
                raise NotFound(f"the server at {link.address.authority} lists no models; name one")
            name = str(listed[0]["id"])
        self.name = name
        self._made: list[RemoteSession] = []
        probe = {"model": name, "messages": [{"role": "user", "content": "a"}]}
        try:
            link.call("POST", "/tokenize", probe)
            self.templated = True
        except HttpFailure as error:
            # Only 400 says that messages cannot be rendered: 404 is an unknown model, 401 a key.
            if error.status != 400:
                raise
            self.templated = False

    def session(self, adapter: str | None = None, **fields: Any) -> RemoteSession:
        """Return a new session. ``fields``: further ones of the body, as ``window``."""
        made = self.link.call("POST", "/v1/sessions", {"model": adapter or self.name, **fields})
        return self.hold(str(made["id"]), adapter)

    def load_session(self, path: str | Path) -> RemoteSession:
        """Upload a state file and return its session."""
        return self._found(self.link.upload("/v1/sessions/state", Path(path)))

    def checkout(self, name: str) -> RemoteSession:
        """Return a session that continues a branch or a commit."""
        return self._found(self.link.call("POST", "/v1/sessions/checkout", {"branch": name}))

    def _found(self, made: Mapping[str, Any]) -> RemoteSession:
        """Return a session that the server made of something kept, under its adapter."""
        held = self.link.call("GET", f"/v1/sessions/{made['id']}?tokens=false")
        return self.hold(str(made["id"]), held.get("adapter"))

    def log(self, name: str) -> list[SimpleNamespace]:
        """Return a commit and all before it, the latest first."""
        return [_commit_of(one) for one in self.link.call("GET", f"/v1/branches/{quote(name)}")["data"]]

    def status(self) -> dict[str, int]:
        """Return the numbers of pages under the names of ``LLM.status``."""
        found = self.link.numbers("/metrics")
        return {f"num_{name[6:]}": int(value) for name, value in found.items() if name.startswith("quire:pages_")}

    def defaults(self) -> SamplingParams:
        """Return the parameters of an answer in a chat that gives none."""
        told = self.link.call("GET", "/props")["default_generation_settings"]["params"]
        told |= {
            "top_k": told["top_k"] or -1,
            "max_tokens": None if told["max_tokens"] == -1 else told["max_tokens"],
            "repetition_penalty": told["repeat_penalty"],
        }
        owns = (own for own, _ in declarations_on(SamplingParams, Surface.GENERATION_CONFIG).values())
        return SamplingParams(**{own: told[own] for own in owns})

    def hold(self, name: str, adapter: str | None) -> RemoteSession:
        """Return the session of that id; ``close`` will delete it."""
        session = RemoteSession(self, name, adapter)
        self._made.append(session)
        return session

    def close(self) -> None:
        """Delete the sessions. A server that is gone has none."""
        while self._made:
            with suppress(QuireError):
                self._made.pop().close()


class RemoteSession:
    """The part of ``Session`` that a chat needs, over HTTP."""

    def __init__(self, model: RemoteModel, name: str, adapter: str | None) -> None:
        self._model, self._name = model, name
        self.adapter = adapter

    def _call(self, method: str, verb: str = "", body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Call the server about this session. Repeat it for ``PATIENCE`` while that is in use."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self._model.link.call(method, f"/v1/sessions/{self._name}{verb}", body)
            except HttpFailure as error:
                if error.status != 409 or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def __len__(self) -> int:
        return int(self._call("GET", "?tokens=false")["num_tokens"])

    @property
    def text(self) -> str:
        """Return the text of all tokens."""
        return str(self._call("GET")["text"] or "")

    @property
    def chat_start(self) -> int | None:
        """Return the number of tokens before the first message of its chat; None without one."""
        found: int | None = self._call("GET", "?tokens=false")["chat_start"]
        return found

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """Return the messages of its chat."""
        return list(self._call("GET")["messages"])

    @property
    def pages(self) -> tuple[int, int]:
        """Numbers of its pages and of the shared ones among them."""
        found = self._call("GET", "?tokens=false")
        return int(found["pages"]), int(found["shared_pages"])

    def stream(self, turn: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield chunks of the answer to a turn, each with its text under ``choices[0].text``.
        ``turn``: ``{"prompt": text}`` or ``{"messages": [...]}``. A turn that is refused leaves the
        session as it was."""
        body = {**fields, **turn, "stream": True, "stream_options": {"include_usage": True}}
        return self._model.link.events(f"/v1/sessions/{self._name}/generate", body)

    @property
    def last_commit(self) -> str | None:
        """Return the id of the commit that it was made from, or was last committed as."""
        found: str | None = self._call("GET", "?tokens=false").get("last_commit")
        return found

    def commit(self, name: str, message: str | None = None) -> SimpleNamespace:
        return _commit_of(self._post("/commit", name=name, message=message))

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        """Return any other verb that the server has under ``verb``: a call whose keyword arguments
        are the body. It returns a session that was made, or the answer's own value."""
        if verb.startswith("_"):
            raise AttributeError(verb)
        return partial(self._post, f"/{verb}")

    def _post(self, verb: str, **body: Any) -> Any:
        answer = self._call("POST", verb, body)
        if "ids" in answer:
            return self._model.hold(str(answer["ids"][0]), self.adapter)
        own = [value for name, value in answer.items() if name not in ("id", "num_tokens")]
        return own[0] if len(own) == 1 else answer if own else None

    def edit(self, span: str, new: str) -> None:
        self._post("/edit", span=span, text=new)

    def use_adapter(self, name: str | None) -> None:
        self._post("/adapter", name=name)
        self.adapter = name

    def save(self, path: str | Path) -> None:
        self._model.link.download(f"/v1/sessions/{self._name}/state", Path(path))

    def close(self) -> None:
        self._call("DELETE")


def _commit_of(answer: Mapping[str, Any]) -> SimpleNamespace:
    """Return the fields of a commit that ``chat.commit_line`` prints."""
    return SimpleNamespace(
        id=answer["id"], time=answer["created"], num_tokens=answer["num_tokens"], message=answer["message"]
    )


class RemoteBackend:
    """Conversations in sessions of a server."""

    def __init__(
        self, model: RemoteModel, fields: Mapping[str, Any], *, window: int | None = None, sink: int = 0
    ) -> None:
        """``fields``: those of a request's body that say how answers are sampled. ``window`` and
        ``sink`` are those of ``LLM.session``."""
        self._model, self._window, self._sink = model, window, sink
        self.templated = model.templated
        self.usual: Mapping[str, Any] = usual_fields(model.name, templated=model.templated)
        self.fields: Mapping[str, Any] = {**self.usual, **fields}
        # A chat uses only the part of ``Session`` that ``RemoteSession`` has.
        self.load_session: Callable[[Path], Session] = cast(Any, model.load_session)
        self.checkout: Callable[[str], Session] = cast(Any, model.checkout)
        self.log: Callable[[str], Sequence[SessionCommit]] = cast(Any, model.log)
        self.status = model.status

    def params(self, fields: Mapping[str, Any]) -> SamplingParams:
        # To a server, null is a field that is not given.
        given = {name: value for name, value in fields.items() if (name, value) != ("max_tokens", None)}
        return self._model.defaults().replace(**given)

    def begin(self, turns: Sequence[TypedTurn], adapter: str | None, system: str | None = None) -> Session:
        messages = messages_of(turns, system) if turns and self.templated else None
        session = self._model.session(adapter, window=self._window, sink=self._sink, messages=messages)
        if turns and not self.templated:
            session.append(text="".join(f"{turn.line}\n{turn.answer}" for turn in turns))
        return cast("Session", session)

    def answer(self, session: Session, line: str | None, system: str | None = None) -> Iterator[AnswerPiece]:
        if line is None:
            # To the server it is no chat, and would have 16 tokens.
            turn: dict[str, Any] = {"max_tokens": self.fields.get("max_tokens") or ANSWER_TOKENS}
        else:
            turn = {"messages": question(line, system)} if self.templated else {"prompt": line + "\n"}
        with closing(cast(Any, cast(RemoteSession, session).stream(turn, self.fields))) as chunks:
            for chunk in chunks:
                choices = chunk.get("choices") or ()
                yield AnswerPiece(
                    "".join(str(choice["text"]) for choice in choices),
                    int((chunk.get("usage") or {}).get("completion_tokens", 0)),
                    any(choice.get("finish_reason") == "length" for choice in choices),
                    (chunk.get("quire") or {}).get("reuse"),
                )

    def is_undone(self, session: Session, before: int, error: BaseException) -> bool:
        # Only a refusal leaves no turn. After a broken connection the server may still add one.
        return isinstance(error, HttpFailure)


def run_remote_chat(
    url: str,
    *,
    model: str | None = None,
    adapter: str | None = None,
    api_key: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    window: int | None = None,
    sink: int = 0,
    system: str | None = None,
    line: str | None = None,
    timeout: float = 600.0,
) -> None:
    """Chat in the terminal until /exit or the end of the input.

    ``model``: by default the first one listed. ``sampling``: fields of ``SamplingParams``; the
    server's defaults count for the others. ``window``, ``sink``: those of ``LLM.session`` for new
    sessions. ``system``: the system message. ``line``: the only line to answer. Raise
    ``QuireError`` if the server cannot be reached or has no sessions.
    """
    link = Link(url, api_key=api_key, timeout=timeout)
    remote = RemoteModel(link, model)
    with closing(remote):
        try:
            backend = RemoteBackend(remote, sampling or {}, window=window, sink=sink)
            chat = TerminalChat(backend, adapter, system)
        except HttpFailure as error:
            if error.status != 405 and (error.status != 404 or error.code is not None):
                raise
            raise QuireError(
                f"the server at {link.address.authority} has no sessions ({error}); a chat needs a server of Quire"
            ) from error
        if line is not None:
            chat.take_only(line)
            return
        print(f"{remote.name} at {link.address.authority}", file=sys.stderr)
        chat.run()
