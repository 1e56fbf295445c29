"""Grammars tried in a child process, which may die of them.

llguidance compiles by recursion without a bound: rules that name each other in a chain of thousands
overflow the thread's stack, which ends the process, and some texts, also short ones, take minutes
or all memory. So what is long or not plain (``must_be_tried``) is first converted, compiled and
asked for masks in a child, in threads with half the stack of ours: what passes there overflows
nowhere here, and what it keeps there, it keeps here. The child's answer is llguidance's grammar
text, so that converting, which is Python that holds the interpreter's lock, is over as well; what
is left to do here releases it.

The child is a ``LimitedProcess`` that imports llguidance and no torch (60 ms).

The stack: many forms were tried (rules, terminals and ``$ref`` in chains, with parentheses,
options, repetitions, arrays and objects inside, up to llguidance's own limits on nesting). A chain
of rules, each in 27 parentheses, needs the most: 911 bytes of stack for each character. Texts that
are compiled at once have a quarter of the stack, at 1 KiB for each character. Masks and tokens need
little: less than 128 KiB at 300,000 characters.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from quire.base.errors import FailedPrecondition, InvalidArgument, QuireError, ResourceExhausted
from quire.base.sampling_params import StructuredOutputs
from quire.grammars.formats import NO_TOKEN, compiled, field_of, grammar_text, is_plain, length_of, reason_of
from quire.text.limited_process import LimitedProcess, LimitReached, TooSlow, serve

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

DEADLINE = 10.0
"""Seconds that converting, compiling and the first masks may take."""

MEMORY = 1 << 30
"""Bytes of address space that the child may have."""

KEPT_MEMORY = 256 << 20
"""Bytes that a compiled grammar may keep, with the states of its first masks."""

GROWTH = 32 << 20
"""Bytes after which the next grammar gets a new child: free memory would hide what one adds."""

USUAL_STACK = 8 << 20
"""Bytes of a thread's stack by default; of larger ones no more is used."""

STACK_PER_CHARACTER = 1 << 10
"""Bytes of stack that a character of a grammar needs at most."""

MASK_STACK = 1 << 20
"""Bytes of stack for masks in the child: half of that of llguidance's threads beside a GPU."""

SEATS = 4
"""Callers that may wait for large grammars; asyncio's pool of threads has five at least."""

PATIENCE = 2.0
"""Seconds that a caller waits for a seat; none if a seat has been taken for longer than that."""

_MASKS = 8


class GrammarsBusy(ResourceExhausted):
    """Too many large grammars are being compiled to begin this one; it may be asked for again."""


def thread_stack() -> int:
    """Return the bytes of a new thread's stack, at most ``USUAL_STACK``."""
    size = threading.stack_size()
    if size:
        threading.stack_size(size)  # asking for it forgets it
    else:
        size = resource.getrlimit(resource.RLIMIT_STACK)[0]
        if size == resource.RLIM_INFINITY:
            size = 2 << 20  # of glibc on x86-64
    return min(size, USUAL_STACK)


def must_be_tried(wanted: StructuredOutputs) -> bool:
    """Return whether compiling may take over a quarter of a thread's stack (a long text), or any
    time and memory (a text that is not plain)."""
    return length_of(wanted) * STACK_PER_CHARACTER > thread_stack() // 4 or not is_plain(wanted)


class GrammarTrial:
    """A child process, started when first needed. Thread-safe; one grammar at a time."""

    def __init__(self, vocab_size: int, special: Mapping[int, bytes]) -> None:
        """Keep ``special``: the special tokens by id, which grammars may name."""
        # Its own deadline, which starting a child is a part of.
        self._process = LimitedProcess(
            "the process that tries grammars",
            f"from quire.grammars.trial import serve_trials; serve_trials({MEMORY})",
            {"vocabulary": {"size": vocab_size, "special": dict(special)}},
            children=1,
            quick=math.inf,
            grace=0.0,
        )
        self._lock = threading.Lock()
        self.kept = 0
        """Bytes that the grammar of the last ``text`` keeps; valid if one caller at a time is let
        in."""
        _TRIALS.add(self)

    def text(self, wanted: StructuredOutputs) -> str:
        """Return ``grammar_text(wanted)`` if it compiles. ``InvalidArgument`` for others, and for
        too much time, memory or stack; ``QuireError`` without a child."""
        name = f"structured_outputs.{field_of(wanted)}"
        request = {
            "stack": thread_stack() // 2,
            "kept_memory": KEPT_MEMORY,
            "field": field_of(wanted),
            "given": wanted.given,
        }
        try:
            with self._lock:
                answer = self._process.ask(request, DEADLINE)
        except TooSlow:
            raise InvalidArgument(f"{name} takes longer than {DEADLINE:g} s to compile; make it smaller") from None
        except LimitReached as error:
            if error.status in (-signal.SIGSEGV, -signal.SIGBUS):
                raise InvalidArgument(
                    f"{name} is nested too deeply to be compiled: rules, references or groups within each other need more "
                    "than the stack of a thread; give it fewer levels"
                ) from None
            raise InvalidArgument(_too_big(name, MEMORY)) from None
        except FailedPrecondition:
            raise FailedPrecondition(f"{name} was not compiled: the LLM is closed; make a new one") from None
        if "text" not in answer:
            raise InvalidArgument(answer["error"])
        self.kept = answer["kept"]
        return str(answer["text"])

    def close(self) -> None:
        """End the child, and what waits for it. There will be no other."""
        self._process.close()

    def forked(self) -> None:
        """Let go of a lock that a thread of the other process may hold."""
        self._lock = threading.Lock()


class Seats:
    """Seats of callers that wait for large grammars: a few, so that threads are left for others."""

    def __init__(self) -> None:
        self._since: dict[object, float] = {}
        self._free = threading.Condition()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Take a seat; ``GrammarsBusy`` if there is none."""
        seat, patience = object(), time.monotonic() + PATIENCE
        # An interrupt may come anywhere: take the seat within, and give it back before anything
        # else.
        try:
            with self._free:
                while len(self._since) >= SEATS:
                    until = min(patience, min(self._since.values(), default=patience) + PATIENCE)
                    if not self._free.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                        raise GrammarsBusy(
                            f"structured_outputs: {len(self._since)} large grammars are waited for, and at most {SEATS} may "
                            "be; try again later"
                        )
                self._since[seat] = time.monotonic()
            yield
        finally:
            self._since.pop(seat, None)
            with self._free:
                self._free.notify_all()


_TRIALS: weakref.WeakSet[GrammarTrial] = weakref.WeakSet()


def _forked() -> None:
    for trial in _TRIALS:
        trial.forked()


os.register_at_fork(after_in_child=_forked)


def _too_big(name: str, memory: int) -> str:
    return f"{name} needs more than {memory >> 20} MiB of memory; make it smaller"


# -- in the child ----------------------------------------------------------------------------------


def serve_trials(memory: int) -> None:
    """Try grammars in the child, with the vocabulary of the greeting."""
    held: list[LLTokenizer] = []
    first = 0

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal first
        if "vocabulary" in request:
            held[:] = [_vocabulary(**request["vocabulary"])]
            first = _resident()
            return {}
        found = _answer(request, held[0])
        return found | {"last": _resident() - first > GROWTH}

    serve(answer, memory)


def _resident() -> int:
    """Return the bytes of memory that this process has."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:  # elsewhere the most that it had
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _answer(request: Mapping[str, Any], vocabulary: LLTokenizer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    matchers: list[LLMatcher] = []
    name = f"structured_outputs.{request['field']}"
    before = _resident()

    def compile_it() -> None:
        wanted = StructuredOutputs(**request["given"])
        text = grammar_text(wanted)
        matchers.append(compiled(wanted, text, vocabulary))
        found["text"] = text

    def mask_it() -> None:
        _try_masks(name, matchers[0])

    try:
        _run(compile_it, request["stack"])
        _run(mask_it, min(request["stack"], MASK_STACK))
    except MemoryError:
        return {"error": _too_big(name, resource.getrlimit(resource.RLIMIT_AS)[0])}
    except QuireError as error:
        return {"error": str(error)}
    found["kept"] = max(0, _resident() - before)
    return found if found["kept"] <= request["kept_memory"] else {"error": _too_big(name, request["kept_memory"])}


def _run(function: Callable[[], None], stack: int) -> None:
    """Call it in a thread with ``stack`` bytes."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threading.stack_size(max(stack, 64 << 10))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _try_masks(name: str, matcher: LLMatcher) -> None:
    """Try a few tokens on a copy. ``InvalidArgument`` if the first mask or token fails, so that
    nothing can be generated; later failures may be rare, and end what is generated."""
    matcher = matcher.deep_copy()
    for number in range(_MASKS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not matcher.is_error() and mask and matcher.consume_token((mask & -mask).bit_length() - 1):
            continue
        reason = reason_of(matcher)
        if number == 0 and reason not in (None, NO_TOKEN):
            raise InvalidArgument(f"{name} is too complex to begin a text: {reason}")
        return


class _Bytes:
    """The bytes as tokens, and the special tokens of a model under their ids."""

    bos_token_id = None

    def __init__(self, size: int, special: Mapping[int, bytes]) -> None:
        self.tokens = [special.get(token, b"") for token in range(size)]
        free = (token for token in range(size) if token not in special)
        for byte in range(256):
            token = next(free, None)
            if token is None:
                self.tokens.append(bytes([byte]))
            else:
                self.tokens[token] = bytes([byte])
        self.eos_token_id = len(self.tokens)
        self.tokens.append(b"<end>")
        self.special_token_ids = sorted({token for token in special if token < size} | {self.eos_token_id})

    def __call__(self, text: bytes | str) -> list[int]:
        raise QuireError("a grammar asked for the tokens of a text")


def _vocabulary(size: int, special: Mapping[int, bytes]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes(size, special)))
