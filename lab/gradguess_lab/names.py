"""Registries are plain dictionaries; looking up a name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from gradguess.errors import InputError

Entry = TypeVar("Entry")


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a name that is not there: it suggests the nearest and lists all."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return InputError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.")


def lookup(registry: Mapping[str, Entry], name: str, kind: str) -> Entry:
    """The entry `name`.

    >>> lookup({"wperp": 1, "wt": 2}, "wprep", "method")
    Traceback (most recent call last):
    ...
    gradguess.errors.InputError: unknown method 'wprep'. Did you mean 'wperp'? Known: wperp, wt.
    """
    if name not in registry:
        raise unknown(kind, name, registry)
    return registry[name]
