"""Packages beyond PyTorch and NumPy, loaded when they are used."""

from __future__ import annotations

import importlib
from typing import Any

from gradguess.errors import GradguessError


def require(module: str, extra: str, what: str) -> Any:
    """Import `module`, or say what needs it and which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = getattr(error, "name", None) or module
        raise GradguessError(
            f"{what} needs {package.partition('.')[0]}, which is not installed: pip install '{extra}'"
        ) from error
