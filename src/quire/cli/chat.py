"""``quire chat``: a conversation in the terminal whose memory can be forked, rewound, saved."""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from quire.base.errors import (
    CONTEXT_FULL,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unsupported,
)
from quire.base.sampling_fields import Surface, declarations_on
from quire.base.sampling_params import SamplingParams
from quire.base.signatures import require_text
from quire.cli.line_input import LineInput, is_typed, paths

if TYPE_CHECKING:
    from quire.llm import LLM
    from quire.sessions.session import Session
    from quire.store.commits import SessionCommit

HELP = """\
/fork [NAME]   copy the conversation under a name (letters, digits and . _ - /; fork-1 and so on unless given) and go
               on in the copy
/switch NAME   go on in another copy
/new [NAME]    begin an empty conversation; the others stay
/system [TEXT] give the conversation a system message, or show it; what was said is run again under it
/set [FIELD [VALUE]]  sample further answers so, as in /set temperature 0.7; the value default takes that back;
               without a value show the field's, without a field those of all fields
/again         take back the last answer, and answer that line once more
/continue      go on with an answer that was cut or interrupted
/rewind [N]    take back the last N turns (yours and the answer) of this chat, or the last one; text that was
               loaded has no turns, unless it is such a chat
/drop N        forget the N oldest turns, or the oldest one, when the context is full; text that was loaded goes first
/edit OLD => NEW  replace a text that occurs once, in a line or an answer; what follows is run again
/text          the whole text of this conversation
/save FILE     write the conversation's state to a file
/load FILE     go on from a state file, under the file's name
/commit NAME [MESSAGE]  keep the conversation in the store, as the next commit of a branch
/checkout NAME go on from a branch or a commit, under that name
/log           the commits of this conversation
/adapter NAME  go on under an adapter; without a name under the base model
/stats         tokens, pages, what is shared and what the last turn reused; who has the pool's pages (evictable: kept
               to be used again)
/help          this text
/exit          leave (also Ctrl-D)
A line that ends with \\ goes on in the next one. A text of several lines can stand between \"\"\" and \"\"\", or be pasted.
Ctrl-C stops an answer. Arrow up brings earlier lines back, Tab completes commands, names and files."""

WAYS_ON = (
    "this conversation fills it: /drop forgets its oldest turn, /drop N more of them, /rewind N takes back "
    "the newest; a chat that is started with --window (and --sink) keeps the last tokens only, and never ends"
)

DEFAULT_MODEL = "tiny-python"
ANSWER_TOKENS = 128
"""Most tokens of what a model does not end itself."""

LEAVING = ("/exit", "/quit", "/bye")

COMMAND = re.compile(r"/[a-z]+|/\?")
"""The first word of a line that is a command. Code and paths may begin with a slash, too."""

OTHER_COMMANDS = {"/?": "/help", "/clear": "/new", "/regen": "/again"}
"""Commands in chats of ollama and llama.cpp, and what they are here."""

STATE_START = b'{"__metadata__":{"header_checksum":"'
"""What stands in a state file behind the 8 bytes of a length."""

SHOWN = 2000
"""Most characters that are shown of a loaded conversation. /text shows all."""

FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
"""Generates an answer to take back, which leaves a session with messages and no answer."""


@dataclass(frozen=True, slots=True)
class TypedTurn:
    """The user's line and the model's answer."""

    line: str
    answer: str
    start: int | None
    """The session's length before the turn; None if the turn cannot be taken back by a rewind."""


@dataclass(slots=True)
class ChatBranch:
    """One conversation."""

    session: Session
    turns: list[TypedTurn] = field(default_factory=list)
    loaded: bool = False
    """Whether it began with text that was loaded and is no turn."""
    system: str | None = None
    """The system message."""
    rebuilt: bool = False
    """Whether it was computed anew since the last answer. It then ends where an answer could
    begin, and the next turn replaces that end."""
    reuse: Mapping[str, Any] | None = None
    """What the last whole turn reused, as ``Reuse.as_dict`` has it."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of an answer."""

    text: str
    tokens: int
    cut: bool = False
    """Whether the answer met a limit here, before the model ended it."""
    reuse: Mapping[str, Any] | None = None
    """What the turn reused, as ``Reuse.as_dict`` has it, once that is known."""


class Backend(Protocol):
    """Where the conversations of a chat are: in this process, or on a server."""

    templated: bool
    """Whether the model has a chat template."""
    usual: Mapping[str, Any]
    """The defaults of a chat that differ from the model's."""
    fields: Mapping[str, Any]
    """These and the fields of sampling that were chosen. The model's defaults count for the
    others."""

    def params(self, fields: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of an answer that these fields give. ``InvalidArgument`` for wrong
        values, and for values that do not go together."""

    def begin(self, turns: Sequence[TypedTurn], adapter: str | None, system: str | None = None) -> Session:
        """Return a new session that holds these turns, behind a system message if there are any."""

    def answer(self, session: Session, line: str | None, system: str | None = None) -> Iterator[AnswerPiece]:
        """Add a line, if any, and yield the answer. ``system``: the message before the first line.
        A line that is refused leaves the session as it was."""

    def is_undone(self, session: Session, before: int, error: BaseException) -> bool:
        """Return whether a turn that ended with ``error`` has left the session as it was, of
        ``before`` tokens."""

    def load_session(self, path: Path) -> Session: ...

    def checkout(self, name: str) -> Session: ...

    def log(self, name: str) -> Sequence[SessionCommit]: ...

    def status(self) -> Mapping[str, int]: ...


class LocalBackend:
    """Conversations in this process."""

    def __init__(self, llm: LLM, fields: Mapping[str, Any], *, window: int | None = None, sink: int = 0) -> None:
        """``fields``: of ``SamplingParams``. ``window`` and ``sink`` are those of
        ``LLM.session``."""
        self._llm, self._window, self._sink = llm, window, sink
        self.templated = llm.tokenizer is not None and bool(llm.tokenizer.chat_templates)
        self.usual: Mapping[str, Any] = usual_fields(llm.config.model, templated=self.templated)
        self.fields: Mapping[str, Any] = {**self.usual, **fields}
        self.params(self.fields)  # Raises ``InvalidArgument`` for wrong values.
        self.load_session, self.checkout, self.log, self.status = llm.load_session, llm.checkout, llm.log, llm.status

    def params(self, fields: Mapping[str, Any]) -> SamplingParams:
        return self._llm.default_params.replace(**fields)

    def begin(self, turns: Sequence[TypedTurn], adapter: str | None, system: str | None = None) -> Session:
        session = self._llm.session(adapter=adapter, window=self._window, sink=self._sink)
        try:
            if turns and self.templated:
                output = session.chat(messages_of(turns, system), FIRST)
                session.rewind(to=len(output.prompt_token_ids))
            elif turns:
                session.append(text="".join(f"{turn.line}\n{turn.answer}" for turn in turns))
        except BaseException:
            session.close()
            raise
        return session

    def answer(self, session: Session, line: str | None, system: str | None = None) -> Iterator[AnswerPiece]:
        params = self.params(self.fields)
        if line is None:
            deltas = session.stream(params)
        elif self.templated:
            deltas = session.stream_chat(question(line, system), params)
        else:
            before = len(session)
            session.append(text=line + "\n")
            try:
                deltas = session.stream(params)
            except QuireError:
                session.rewind(to=before)
                raise
        with deltas:
            for delta in deltas:
                yield AnswerPiece(delta.text, len(delta.token_ids), delta.finish_reason == "length")
        yield AnswerPiece("", 0, reuse=None if deltas.reuse is None else deltas.reuse.as_dict())

    def is_undone(self, session: Session, before: int, error: BaseException) -> bool:
        return len(session) == before


class TerminalChat:
    """A chat that reads stdin, streams answers to stdout and says everything else on stderr."""

    def __init__(self, backend: Backend, adapter: str | None = None, system: str | None = None) -> None:
        """Begin a session. ``system``: the system message."""
        self._backend = backend
        if system is not None:
            self._check_system("--system", system)
        self._branches: dict[str, ChatBranch] = {"main": ChatBranch(backend.begin([], adapter), system=system)}
        self._name, self._goes_on = "main", "/continue goes on"
        self._commands: dict[str, Callable[[str], None]] = {
            "/fork": self._fork,
            "/switch": self._switch,
            "/new": self._new,
            "/system": self._system,
            "/set": self._set,
            "/again": self._again,
            "/continue": self._continue,
            "/rewind": self._rewind,
            "/drop": self._drop,
            "/edit": self._edit,
            "/text": lambda _: self._say(self._session.text),
            "/save": self._save,
            "/load": self._load,
            "/commit": self._commit,
            "/checkout": self._checkout,
            "/log": self._log,
            "/adapter": self._adapter,
            "/stats": self._stats,
            "/help": lambda _: self._say(HELP),
        }

    @property
    def _branch(self) -> ChatBranch:
        return self._branches[self._name]

    @property
    def _session(self) -> Session:
        return self._branch.session

    def run(self) -> None:
        """Take lines until /exit or the end of the input. If they are not typed, an interrupt ends
        the chat, and a refused line lets it end with exit code 2."""
        refused = False
        self._note_template("your lines are appended as they are, and it continues the text")
        self._say("/help lists the commands")
        with LineInput(self._completions) as lines:
            while True:
                try:
                    line = lines.read_text(f"{self._name}> ")
                except EOFError:
                    if is_typed():
                        self._say("")  # so that the shell begins in a line of its own
                    break
                except KeyboardInterrupt:
                    if not is_typed():
                        raise
                    self._say("\n/exit or Ctrl-D leaves")
                    continue
                if not line.strip():
                    continue
                before = list(self._branch.turns)
                try:
                    if not self.take(line):
                        break
                except QuireError as error:
                    refused = not is_typed()
                    self._say(str(error))
                except KeyboardInterrupt:
                    if not is_typed():
                        raise
                    print(flush=True)
                    turns, ways = self._branch.turns, ""
                    if turns != before:
                        stays = "what was generated stays" if turns and turns[-1].answer else "the line stays"
                        ways = f"; {stays}: /continue goes on, /rewind takes the turn back"
                    self._say(f"interrupted{ways}")
        if refused:
            sys.exit(2)

    def take_only(self, line: str) -> None:
        """Take the only line of a chat, in which no command follows."""
        self._note_template("it continues the line")
        self._goes_on = "by --max-tokens or the end of the context"
        self.take(line)

    def _note_template(self, done: str) -> None:
        if not self._backend.templated:
            self._say(f"this model has no chat template: {done}")

    def take(self, line: str) -> bool:
        """Take one line, a command or a turn. Return False to end the chat."""
        word, _, rest = line.partition(" ")
        word = OTHER_COMMANDS.get(word, word)
        if word in LEAVING:
            return False
        if not COMMAND.fullmatch(word):
            self._turn(line)
        elif word in self._commands:
            self._commands[word](rest.strip())
        else:
            raise InvalidArgument(
                f"unknown command {word}; /help lists the commands; text that begins so needs a space before it"
            )
        return True

    # -- turns -------------------------------------------------------------------------------------

    def _turn(self, line: str) -> None:
        require_text("the line", line)  # by itself: an index in it is one that the user can find
        branch, before = self._branch, len(self._session)

        def keep(answer: str) -> None:
            branch.turns.append(TypedTurn(line, answer, None if branch.rebuilt else before))
            branch.rebuilt = False

        self._answer(line, keep)

    def _again(self, _: str) -> None:
        if not self._branch.turns:
            raise InvalidArgument("/again: there is no answer yet; type a line")
        line = self._branch.turns[-1].line
        self._take_back(1)
        self._turn(line)

    def _continue(self, _: str) -> None:
        branch = self._branch
        if branch.rebuilt or not (branch.turns or branch.loaded):
            why = (
                "the conversation was computed anew since its last answer"
                if branch.rebuilt
                else "there is no answer yet"
            )
            raise InvalidArgument(f"/continue: {why}; type a line")

        def keep(more: str) -> None:
            for turn in branch.turns[-1:]:  # none: what was loaded goes on
                branch.turns[-1] = replace(turn, answer=turn.answer + more)

        self._answer(None, keep)

    def _answer(self, line: str | None, keep: Callable[[str], None]) -> None:
        """Print the answer to a line, or more of the last one, and ``keep`` it."""
        branch, before = self._branch, len(self._session)
        started = time.perf_counter()
        answer, count, is_cut = "", 0, False
        system = None if branch.turns or branch.loaded else branch.system
        try:
            with closing(cast(Any, self._backend.answer(branch.session, line, system))) as pieces:
                for piece in pieces:
                    answer, count = answer + piece.text, count + piece.tokens
                    is_cut |= piece.cut
                    if piece.reuse is not None:
                        branch.reuse = piece.reuse
                    print(piece.text, end="", flush=True)
        except BaseException as error:
            if answer and isinstance(error, QuireError):
                print(flush=True)  # so that the error begins in a line of its own
            if not self._backend.is_undone(branch.session, before, error):
                keep(answer)
            elif isinstance(error, QuireError) and before and _says_full(error):
                raise ResourceExhausted(f"{error}; {WAYS_ON}") from error
            raise
        keep(answer)
        if line is None and not answer:
            self._say("the model had ended its answer, and adds nothing")
            return
        print(flush=True)
        cut = f"; cut there, {self._goes_on}" * is_cut
        self._say(f"[{count} tokens in {time.perf_counter() - started:.2f} s{cut}]")

    def _rebuild(self, branch: ChatBranch, turns: Sequence[TypedTurn]) -> None:
        """Replace a conversation by these turns, computed anew."""
        old = branch.session
        branch.session = self._backend.begin(turns, old.adapter, branch.system)
        branch.turns = [replace(turn, start=None) for turn in turns]
        branch.loaded, branch.rebuilt = False, bool(turns)
        old.close()

    # -- commands ----------------------------------------------------------------------------------

    def _free_name(self, command: str, name: str) -> str:
        """Return the name of a new conversation, ``name`` if it is given."""
        from quire.store.commits import checked_branch

        numbered = (f"{command[1:]}-{number}" for number in itertools.count(1))
        name = name or next(free for free in numbered if free not in self._branches)
        if name in self._branches:
            raise InvalidArgument(
                f"{command} NAME: {name!r} is taken; give a new name; there are {', '.join(self._branches)}"
            )
        checked_branch(name)
        return name

    def _fork(self, name: str) -> None:
        name, branch = self._free_name("/fork", name), self._branch
        self._branches[name] = replace(branch, session=branch.session.fork(), turns=list(branch.turns))
        self._name = name
        self._say(f"now in {name}; nothing was copied")

    def _new(self, name: str) -> None:
        name, branch = self._free_name("/new", name), self._branch
        session = self._backend.begin([], branch.session.adapter)
        self._branches[name], self._name = ChatBranch(session, system=branch.system), name
        self._say(f"now in {name}, which is empty" + " but for the system message" * (branch.system is not None))

    def _check_system(self, command: str, text: str) -> None:
        """Refuse a system message for a model that has no place for it."""
        require_text(command, text)
        if not self._backend.templated:
            raise Unsupported(f"{command}: this model has no chat template, so it has no system message; type a line")

    def _system(self, text: str) -> None:
        branch = self._branch
        if not text:
            self._say(branch.system or "there is no system message; /system TEXT gives one")
            return
        self._check_system("/system", text)
        if branch.loaded:
            raise InvalidArgument("/system: text that was loaded stays as it is; /new begins another conversation")
        before, branch.system = branch.system, text
        try:
            if branch.turns:
                self._rebuild(branch, branch.turns)
        except BaseException:
            branch.system = before
            raise
        self._say(f"{len(branch.session)} tokens" if branch.turns else "it comes before your first line")

    def _set(self, text: str) -> None:
        name, _, value = (part.strip() for part in text.partition(" "))
        backend, names = self._backend, chat_fields()
        if name and name not in names:
            raise InvalidArgument(f"/set {name[:60]!r}: there are {', '.join(names)}")
        fields = dict(backend.fields)
        if value == "default":
            fields.pop(name, None)
            fields = {**backend.usual, **fields}
        elif value:
            fields[name] = _value(value)
        params = backend.params(fields)
        backend.fields = fields
        for one in [name] if name else names:
            self._say(f"{one} {json.dumps(getattr(params, one), ensure_ascii=False)}")

    def _switch(self, name: str) -> None:
        if name not in self._branches:
            raise NotFound(f"/switch {name!r}; there are {', '.join(self._branches)}")
        self._name = name
        self._say(f"now in {name}, {len(self._session)} tokens")

    def _rewind(self, text: str) -> None:
        turns = self._branch.turns
        count = _number("/rewind", text or "1", len(turns), "turns can be taken back", "take back")
        cost = self._take_back(count)
        self._say(f"{len(self._session)} tokens are left" + ("" if cost is None else f", {cost} will be run again"))

    def _take_back(self, count: int) -> int | None:
        """Take back the last turns. Return the number of tokens that will be run again; None: the
        conversation was computed anew."""
        branch = self._branch
        start = branch.turns[-count].start
        if start is None:
            self._rebuild(branch, branch.turns[:-count])
            return None
        cost = branch.session.rewind(to=start)
        del branch.turns[-count:]
        return cost

    def _drop(self, text: str) -> None:
        branch = self._branch
        most = len(branch.turns) + branch.loaded
        what = "turns (the text that was loaded is the first)" if branch.loaded else "turns"
        count = _number("/drop", text or "1", most, f"{what} can be forgotten", "forget")
        self._rebuild(branch, branch.turns[count - branch.loaded :])
        self._say(f"{len(branch.turns)} turns are left, {len(branch.session)} tokens")

    def _edit(self, text: str) -> None:
        old, arrow, new = text.partition(" =>")
        branch, new = self._branch, new.removeprefix(" ")
        held = [index for index, turn in enumerate(branch.turns) if old in turn.line or old in turn.answer]
        if not arrow or len(held) != bool(branch.turns):
            raise InvalidArgument(
                f"/edit {text!r}; OLD => NEW is needed, and OLD is in {len(held)} turns of this chat, where it must be in one line or "
                "answer"
            )
        before = len(branch.session)
        branch.session.edit(span=old, new=new)
        shift = len(branch.session) - before
        for index, turn in enumerate(branch.turns):
            start = turn.start if turn.start is None or index <= held[0] else turn.start + shift
            line, answer = turn.line.replace(old, new), turn.answer.replace(old, new)
            branch.turns[index] = replace(turn, line=line, answer=answer, start=start)
        self._say(f"{len(branch.session)} tokens")

    def _save(self, path: str) -> None:
        file = _file("/save", path)
        _check_replaced(file)
        self._session.save(file)
        self._say(f"{file.stat().st_size:,} bytes written to {path}")

    def _load(self, path: str) -> None:
        file = _file("/load", path)
        self._enter(self._backend.load_session(file), file.stem)

    def _enter(self, session: Session, name: str) -> None:
        """Go on in a session that was made elsewhere."""
        text, found = session.text, turns_of(session)
        system, turns = (None, []) if found is None else found
        while name in self._branches:
            name += "'"
        self._branches[name], self._name = ChatBranch(session, turns, found is None, system), name
        if len(text) > SHOWN:
            self._say(f"[{len(text) - SHOWN:,} characters before; /text shows them]")
        self._say(text[-SHOWN:])
        self._say(f"now in {name}, {len(session)} tokens")

    def _commit(self, text: str) -> None:
        name, _, message = text.partition(" ")
        try:
            commit = self._session.commit(name=name, message=message.strip() or None)
        except FailedPrecondition as error:
            raise FailedPrecondition(f"{error}; /save FILE keeps this conversation now") from error
        self._say(f"{commit_line(commit)}: {name}")

    def _checkout(self, name: str) -> None:
        self._enter(self._backend.checkout(name), name)

    def _log(self, _: str) -> None:
        head = self._session.last_commit
        for commit in [] if head is None else self._backend.log(head):
            self._say(commit_line(commit))
        if head is None:
            self._say("this conversation was not committed; /commit NAME does")

    def _adapter(self, name: str) -> None:
        try:
            self._session.use_adapter(name or None)
        except NotFound as error:
            raise NotFound(
                f"/adapter {name!r} is not loaded; --adapters NAME=WHERE loads adapters at the start"
            ) from error
        self._say(f"under adapter {name}" if name else "under the base model")

    def _stats(self, _: str) -> None:
        for name, branch in self._branches.items():
            session = branch.session
            held, shared = session.pages
            mark = "*" if name == self._name else " "
            under = f", adapter {session.adapter}" if session.adapter is not None else ""
            self._say(f"{mark} {name}: {len(session)} tokens, {held} pages, {shared} of them shared{under}")
            if (reuse := branch.reuse) is not None:
                tiers = ", ".join(f"{count} from {tier}" for tier, count in reuse["by_tier"].items())
                self._say(f"    last turn: {reuse['reason']}" + f" ({tiers})" * bool(tiers))
        kinds = ("free", "evictable", "held", "pinned")
        use = self._backend.status()
        self._say("of all pages " + ", ".join(f"{use[f'num_pages_{kind}']} {kind}" for kind in kinds))

    def _completions(self, line: str) -> list[str]:
        """Return possible completions of a line's last word."""
        word, space, rest = line.partition(" ")
        if not word.startswith("/"):
            return []
        if not space:
            return [*self._commands, *LEAVING]
        if word in ("/save", "/load"):
            return paths(rest)
        return {"/switch": list(self._branches), "/set": chat_fields()}.get(word, [])

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def usual_fields(model: str, *, templated: bool) -> dict[str, Any]:
    """Return the fields of sampling that a chat has unless the user gives them. A model with a chat
    template ends its answers itself. Text without one goes on for ever, and so does the bundled
    model."""
    return {"max_tokens": ANSWER_TOKENS if model == DEFAULT_MODEL or not templated else None}


def commit_line(commit: SessionCommit) -> str:
    """Return a commit in a line."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(commit.time))
    return f"{commit.id[:12]}  {when}  {commit.num_tokens} tokens  {commit.message}".rstrip()


def chat_fields() -> list[str]:
    """Return the fields of sampling that a chat can set."""
    return sorted(declarations_on(SamplingParams, Surface.COMMAND))


def _value(text: str) -> Any:
    """Return a value as JSON says it, or as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def question(line: str, system: str | None) -> list[dict[str, str]]:
    """Return a line as messages for a chat template, behind the system message if there is one."""
    return [*messages_of([], system), {"role": "user", "content": line}]


def turns_of(session: Session) -> tuple[str | None, list[TypedTurn]] | None:
    """Return the system message and the turns of a session that is a chat of a system message, if
    any, lines and answers; None for any other."""
    messages = list(session.messages) if session.chat_start == 0 else []
    if any(one.keys() != {"role", "content"} or not isinstance(one["content"], str) for one in messages):
        return None
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
    lines, answers = messages[::2], messages[1::2]
    if not messages or [one["role"] for one in messages] != ["user", "assistant"] * len(lines):
        return None
    return system, [
        TypedTurn(one["content"], other["content"], None) for one, other in zip(lines, answers, strict=True)
    ]


def messages_of(turns: Sequence[TypedTurn], system: str | None = None) -> list[dict[str, str]]:
    """Return turns as messages for a chat template, behind the system message if there is one."""
    spoken = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in (("user", turn.line), ("assistant", turn.answer))
    ]
    return spoken if system is None else [{"role": "system", "content": system}, *spoken]


def _number(command: str, text: str, most: int, can: str, to: str) -> int:
    """Return a number in 1..``most``; refuse any other text in the words ``can`` and ``to``."""
    if text in map(str, range(1, most + 1)):
        return int(text)
    accepted = f"1..{most} {can}" if most else f"there are 0 turns to {to}"
    raise InvalidArgument(f"{command} N: N {f'is {text[:20]!r}' if text else 'is missing'}; {accepted}")


def _file(command: str, path: str) -> Path:
    if not path:
        raise InvalidArgument(f"{command} needs a file name")
    return Path(path).expanduser()


def _check_replaced(file: Path) -> None:
    """Refuse to replace a file that is no saved state, such as a completed name of another file."""
    with suppress(OSError):  # the save itself names what is wrong with a path
        if not file.is_file():
            return
        with file.open("rb") as there:
            start = there.read(8 + len(STATE_START))
        if start and start[8:] != STATE_START:
            raise InvalidArgument(f"/save {str(file)!r}: a file of that name is no saved state; give another name")


def _says_full(error: QuireError) -> bool:
    """Return whether an error, perhaps of a server, says that there is no room."""
    return isinstance(error, ResourceExhausted) or error.code in (CONTEXT_FULL, "resource_exhausted")
