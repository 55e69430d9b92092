"""Ctrl-C that is not lost.

Python raises `KeyboardInterrupt` wherever it happens to be. In a `__del__`, in the callback of a weak reference or of
the garbage collector, or below a C library, it is printed and forgotten, and the run goes on. So a command counts
Ctrl-C (`listening`), and a loop asks between two steps (`asked_between_steps`, `check`). Importing changes no handler.
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
    """Count Ctrl-C meanwhile. The first waits for `check` where a loop asks; else it, and the second, raise at once.

    The third ends the process on the spot. Nothing changes outside of the main thread, where Python has no handlers,
    and for a process that was started to ignore Ctrl-C.
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
    """The block calls `check` often. Its end, where all is saved, is one such place."""
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
