"""A command's failures as one sentence on stderr and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NoReturn

from quire.errors import QuireError


@contextmanager
def one_sentence(options: Collection[str] = ()) -> Iterator[None]:
    """Turn an error into an exit code and a line on stderr that names one of ``options``."""
    try:
        yield
    except QuireError as error:
        name = (error.field or "").split(".")[0]
        option = f"--{name.replace('_', '-')}: " if name in options else ""
        _fail(option + " ".join(str(error).split()), 2)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        _fail("interrupted", 130)
    except MemoryError:
        _fail(
            "this machine does not have enough memory for that; try a smaller model, kv_cache_memory or max_model_len",
            2,
        )
    except UnicodeError as error:
        _fail(f"text is not in the encoding of the terminal or pipe ({error}); PYTHONIOENCODING=utf-8 may help", 2)
    except BrokenPipeError:
        _drop_output()  # the reader is gone
        sys.exit(141)
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        if error.filename is not None:
            _fail(f"{error.filename}: {reason}", 2)
        if error.errno is None or isinstance(error, ConnectionError):
            _fail(reason, 2)
        _drop_output()
        _fail(f"output cannot be written: {reason}", 2)


def _drop_output() -> None:
    """Discard buffered output for stdout, so that the interpreter reports no error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> NoReturn:
    print(f"quire: {message}", file=sys.stderr)
    sys.exit(code)
