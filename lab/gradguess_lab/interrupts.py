"""Ctrl-C that is not lost.

Python raises `KeyboardInterrupt` wherever it happens to be. In a `__del__`, in the callback of a weak reference or of
the garbage collector, or below a C library, the exception is printed and forgotten, and the run goes on. So a command
counts Ctrl-C (`listening`), and a loop asks between two steps (`asked_between_steps`, `check`). Importing this module
changes no handler.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

INTERRUPTED = 130  # the exit code that shells expect


class _Ctrl:
    """How often Ctrl-C was pressed, and whether a loop will ask."""

    presses = 0
    asked = False


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Count Ctrl-C while the block runs. Where a loop asks, the first waits for `check`; otherwise it raises at once.

    The second always raises at once, and the third ends the process. Nothing changes outside of the main thread, where
    Python has no handlers, and in a process that was started to ignore Ctrl-C.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (_press, signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGINT, _press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _Ctrl.presses = 0


def _press(*_: object) -> None:
    _Ctrl.presses += 1
    if _Ctrl.presses > 2:
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(INTERRUPTED)
    if _Ctrl.presses == 2 or not _Ctrl.asked:
        raise KeyboardInterrupt


@contextlib.contextmanager
def asked_between_steps() -> Iterator[None]:
    """For a block that calls `check` often. Its end, where everything is saved, is one more place to stop."""
    _Ctrl.asked = True
    try:
        yield
    finally:
        _Ctrl.asked = False
    check()


def check() -> None:
    """Raise `KeyboardInterrupt` if Ctrl-C was pressed, wherever that was."""
    if _Ctrl.presses:
        raise KeyboardInterrupt
