"""Packages that only the report needs, loaded when it is made."""

from __future__ import annotations

import importlib
from typing import Any

from gradguess.errors import GradguessError

__all__ = ["require"]


def require(module: str) -> Any:
    """Import `module`, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise GradguessError(
            f"the report needs {package}, which is not installed: pip install 'gradguess[report]'"
        ) from error
