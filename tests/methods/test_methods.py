"""What holds for every method, and for every guess."""

from __future__ import annotations

import copy
import dataclasses

import pytest

import gradguess as gg
from models import GUESSES

RIVALS = {name: getattr(gg.baselines, name)() for name in gg.baselines.__all__}
METHODS = {**GUESSES, **RIVALS, "backprop": gg.Backprop(), "feedback": gg.Feedback(gg.WPerp(k=3))}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_a_value(name):
    """It may be a key of a dict, or shared by two models: equal settings are equal, and nobody can change them."""
    method = METHODS[name]
    twin = copy.deepcopy(method)
    assert twin is not method
    assert twin == method
    assert hash(twin) == hash(method)
    with pytest.raises(dataclasses.FrozenInstanceError, match="refresh"):
        method.refresh = 2


def test_other_settings_are_another_method():
    assert len({*METHODS.values(), *map(copy.copy, METHODS.values())}) == len(METHODS)
