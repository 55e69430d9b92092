"""The state of a run as a flat dict of tensors, and back. A key is "cache" or "learned", the site, and the name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradguess.step.base import State


def flattened(state: State) -> dict[str, Tensor]:
    """All of it, copied."""
    flat = {"steps": torch.tensor(state.count)}
    for kind, entries in (("cache", state.kept), ("learned", state.learned)):
        for site, values in entries.items():
            flat.update({f"{kind}/{site}/{key}": value.detach().clone() for key, value in values.items()})
            if not values:  # there was nothing to find: that is known as well
                flat[f"{kind}/{site}/"] = torch.empty(0)
    return flat


def unflattened(flat: Mapping[str, Tensor], device: torch.device) -> State:
    """The state that was flattened, copied to a device. Other keys are passed over."""
    found: dict[str, dict[str, dict[str, Tensor]]] = {"cache": {}, "learned": {}}
    for key, value in flat.items():
        kind, _, rest = key.partition("/")
        if rest:
            site, _, name = rest.rpartition("/")
            values = found[kind].setdefault(site, {})
            if name:
                values[name] = value.detach().clone().to(device)
    return State(found["cache"], found["learned"], int(flat["steps"]))
