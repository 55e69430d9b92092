"""The checkpoint of a run: one safetensors file, without pickle, whose metadata hold all that is no tensor as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load as unpacked
from safetensors.torch import save as packed
from torch import Tensor

from gradguess.errors import GradguessError
from gradguess_lab.files import explained, write_atomic

FILE = "checkpoint.safetensors"


def save(directory: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Make (`tensors`, `state`) the checkpoint of `directory`, in one step."""
    plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    write_atomic(directory / FILE, packed(plain, {"state": json.dumps(state)}))


def load(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The checkpoint of `directory`, or None where there is none yet; damage is an error that says so."""
    path = directory / FILE
    if not path.exists():
        return None
    with explained(path):
        data = path.read_bytes()  # at once: `safe_open` opens it twice, and the run may replace it in between
    try:
        tensors = unpacked(data)
        state = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["state"])
        if not state["rows"] or state.keys() != {"rows", "peak_mb"}:
            raise ValueError("its fields are not those that are written")
    except Exception as error:  # the library has errors of its own, and the header may say anything
        raise GradguessError(
            f"checkpoint {path} is damaged ({error!r:.120}). It cannot be continued: restore it, or "
            f"delete {directory} to start afresh."
        ) from error
    return tensors, state


def by_part(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors with names like `part/name`, as one dictionary for each part."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        part, _, name = key.partition("/")
        parts.setdefault(part, {})[name] = value
    return parts
