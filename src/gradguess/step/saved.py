"""The state of a run as a flat dict of tensors, and back. A key is "cache" or "learned", the site, and the name."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradguess.errors import InputError, reason_of
from gradguess.guesses.base import Guess
from gradguess.model.site import Sites
from gradguess.step.base import State

_FURTHER = re.compile(r"(#\d+)?(\[\d+\])?$")  # what follows a module's name in that of a site


def made_by(method: object, sites: Sites) -> Tensor:
    """The types of a method and of the guesses in it, and the sites, as text: `Feedback(WPerp), sites='auto'`."""
    parts = [type(part).__name__ for part in getattr(method, "__dict__", {}).values() if isinstance(part, Guess)]
    name = type(method).__name__ + (f"({', '.join(parts)})" if parts else "")
    chosen = sites if isinstance(sites, str | int) else sorted(sites)
    return torch.tensor(list(f"{name}, sites={chosen!r}".encode()), dtype=torch.uint8)


def flattened(state: State) -> dict[str, Tensor]:
    """All of it, copied."""
    flat = {"steps": torch.tensor(state.count)}
    for kind, entries in (("cache", state.kept), ("learned", state.learned)):
        for site, values in entries.items():
            flat.update({f"{kind}/{site}/{key}": value.detach().clone() for key, value in values.items()})
            if not values:  # there was nothing to find: that is known as well
                flat[f"{kind}/{site}/"] = torch.empty(0)
    return flat


def unflattened(flat: Mapping[str, Tensor], device: torch.device, model: nn.Module, own: Tensor) -> State:
    """The state that was flattened, copied to a device, if it may be one of this model and was `made_by` the same."""
    expected, saved = (bytes(text.tolist()).decode() for text in (own, flat.get("method", own)))
    if saved != expected:
        raise InputError(
            f"state: expected one of {expected}, found one of {saved}. Load it with the method and the sites that it "
            "was saved with; their numbers, such as k, may differ."
        )
    found: dict[str, dict[str, dict[str, Tensor]]] = {"cache": {}, "learned": {}}
    for key, value in flat.items():
        kind, _, rest = key.partition("/")
        if rest and kind not in found:
            raise InputError(f"state: expected what ForwardGradient.state_dict() returns, found the key {key!r}.")
        if rest:
            site, _, name = rest.rpartition("/")
            values = found[kind].setdefault(site, {})
            if name:
                values[name] = value.detach().clone().to(device)
    sites = {*found["cache"], *found["learned"]}
    known = {name or type(model).__name__ for name, _ in model.named_modules()}
    if sites and not known & {_FURTHER.sub("", site) for site in sites}:
        raise InputError(
            f"state: expected sites that are modules of {type(model).__name__}, found {', '.join(sorted(sites)[:3])}, "
            "of which none is. Load it into the model that it was saved with."
        )
    return State(found["cache"], found["learned"], int(flat["steps"]))


def random_state(state: Tensor, device: torch.device) -> Tensor:
    """The state of a generator, if one on this device takes it."""
    state, generator = state.cpu().to(torch.uint8), torch.Generator(device)
    try:
        generator.set_state(state)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"state: expected that of a generator on {device.type}, {len(generator.get_state())} bytes, found "
            f"{state.numel()} ({reason_of(error)}). Load it on a device of the kind that it was saved on."
        ) from error
    return state
