"""A process that has imported what all tests need, and becomes a pytest for each request by a fork.

Started as `python -m mutants.server MODULE ...`. A request is a line of JSON on its input: `cwd`, `environment`,
`arguments` of pytest and `limit` in seconds. The answer is a line with the exit status, or `null` where the time ran
out. When its input ends, it ends, with all that its last pytest has started.
"""

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
from typing import Any

BEAT = 0.02  # seconds between two looks


def main(modules: list[str]) -> None:
    answers = os.dup(1)
    silence(1)
    for name in modules:
        with suppress(ImportError):
            import_module(name)
    while line := _line():
        os.write(answers, json.dumps(serve(json.loads(line))).encode() + b"\n")


def serve(request: dict[str, Any]) -> int | None:
    """Fork, wait, and end the group of the child."""
    child = os.fork()
    if child == 0:
        try:
            become_pytest(request)
        finally:
            os._exit(70)
    end = time.monotonic() + request["limit"]
    code = None
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        if select.select([0], [], [], BEAT)[0]:  # nobody asks while an answer is due: the input has ended
            end = 0.0
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what the tests started as well
    if code is None:
        with suppress(ChildProcessError):
            os.waitpid(child, 0)
    return code


def become_pytest(request: dict[str, Any]) -> None:
    os.setsid()
    silence(0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*paths, *(path for path in sys.path if path and path not in paths)]
    sys.argv = ["pytest", *request["arguments"]]
    import pytest

    os._exit(int(pytest.main(request["arguments"])))


def silence(first: int) -> None:
    """Let the standard streams from that one on lead nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(first, 3):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _line() -> bytes:
    """From the input without a buffer, so that `select` sees what is there."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            return b""
        line += piece
    return line


if __name__ == "__main__":
    main(sys.argv[1:])
