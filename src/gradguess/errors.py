"""The errors and warnings a user can see. Each says what was expected, what was found and what to do."""

from __future__ import annotations

import difflib
import importlib
import sys
import warnings
from collections.abc import Iterable
from typing import Any

PACKAGE = __file__.removesuffix("errors.py")


class GradguessError(Exception):
    """Base of every error that gradguess raises on purpose."""


class InputError(GradguessError, ValueError):
    """An argument, a model or a loss that gradguess cannot work with."""


class ForwardModeError(GradguessError, NotImplementedError):
    """A layer through which PyTorch cannot carry a tangent."""


class NonFiniteError(GradguessError, ArithmeticError):
    """A loss or a directional derivative that is NaN or infinite."""


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse anything but a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name}: expected a whole number of at least {least}, found {value!r}.")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> Any:
    """The value, which must be one of `choices`; an error suggests the nearest."""
    *others, last = known = list(choices)
    if value not in known:
        near = difflib.get_close_matches(str(value), known, 1, 0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{name}: expected {', '.join(map(repr, others))} or {last!r}, found {value!r}.{hint}")
    return value


def reason_of(error: Exception) -> str:
    """The type of another's error and its words, in one line. That memory is out is no reason: it is raised."""
    import torch  # here: the help of the command needs errors, and no PyTorch

    cause = getattr(error, "inner_exception", error)  # the compiler wraps what it meets
    text = str(cause)
    if isinstance(cause, torch.OutOfMemoryError | MemoryError) or "out of memory" in text or "allocate memory" in text:
        raise cause
    return ": ".join([type(cause).__name__, *text.splitlines()[:1]])[:200]


def warn(text: str) -> None:
    """Warn of what is at the line that called gradguess."""
    level, outermost, frame = 1, 1, sys._getframe()
    while frame is not None:
        level += 1
        if frame.f_code.co_filename.startswith(PACKAGE):
            outermost = level
        frame = frame.f_back  # type: ignore[assignment]
    warnings.warn(text, stacklevel=outermost)


def require(module: str, extra: str, what: str) -> Any:
    """Import a package beyond PyTorch and NumPy, or say what needs it and which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = getattr(error, "name", None) or module
        raise GradguessError(
            f"{what} needs {package.partition('.')[0]}, which is not installed: pip install '{extra}'"
        ) from error
