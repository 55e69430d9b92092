"""Files that are either whole or absent, and directories with one owner.

A run may be killed at any instruction. So a file is written beside its final name and renamed (readers see
the old or the new content, never half), and a directory is locked while a process writes to it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradguess.errors import GradguessError


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an operating-system error while touching `path` into one sentence that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise GradguessError(
                f"the disk is full: {path} could not be written. Free some space and run the same command "
                "again; what is finished is kept."
            ) from error
        raise GradguessError(f"{path}: {error.strerror or error}") from error


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace `path` by `content` in one step. On failure the old file stays, and nothing else is left behind."""
    data = content.encode() if isinstance(content, str) else content
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained(path):
        try:
            aside.write_bytes(data)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of indented JSON."""
    write_atomic(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path, what: str, expected: type = dict) -> Any:
    """The JSON object (or another value of the `expected` type) in `path`; `what` names the file's role in errors."""
    with explained(path):
        value = decoded(path.read_bytes(), f"{what} {path}", "delete it to start afresh")
    if not isinstance(value, expected):
        name = "object" if expected is dict else expected.__name__
        raise GradguessError(f"{what} {path} must hold a JSON {name}, found {type(value).__name__}.")
    return value


def decoded(data: bytes, where: str, remedy: str) -> Any:
    """The JSON value; an error says where it stands and what to do."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise GradguessError(f"{where} is truncated or not JSON ({error}); {remedy}.") from error


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Lock `directory` while the block runs, and refuse a second process. The kernel frees the lock of a dead one."""
    path = directory / ".lock"
    with explained(path):
        directory.mkdir(parents=True, exist_ok=True)
        handle = path.open("a")
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise GradguessError(
                f"{directory} is in use by another process; wait for it or choose another --out."
            ) from error
        yield
