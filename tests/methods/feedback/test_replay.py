"""With `memory="replay"` nothing is kept per layer, whether or not a step searches."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gradguess as gg
from models import CLASSES, INPUTS, Block, make


def test_chained_over_a_graph_is_refused():
    case = make("residual")
    forward = gg.ForwardGradient(case.model, gg.Feedback(gg.WPerp(k=3), form="chained"), memory="replay")
    with pytest.raises(gg.InputError, match=r"memory='store' or form='direct'"):
        forward(*case.args)


class Alive:
    """How much memory tensors of the batch's size hold when the last layer runs, when every layer has been met."""

    def __init__(self, last: nn.Module, batch: int) -> None:
        self.batch, self.most = batch, 0
        last.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        found = {}
        for item in gc.get_objects():
            if type(item) is torch.Tensor and item.dim() > 1 and item.shape[0] == self.batch:
                found[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        self.most = max(self.most, sum(found.values()))


def _plain(depth: int) -> list[nn.Module]:
    return [layer for _ in range(depth) for layer in (nn.Linear(32, 32), nn.ReLU())]


def _residual(depth: int) -> list[nn.Module]:
    return [Block(32) for _ in range(depth)]


def _softmax(depth: int) -> list[nn.Module]:
    return [layer for _ in range(depth) for layer in (nn.Linear(32, 32), nn.Softmax(-1))]


METHODS = {
    **{form: gg.Feedback(gg.WPerp(k=3), form=form) for form in ("direct", "chained", "corrected")},
    "activation": gg.ActivationPerturbation(),
    "wperp": gg.WPerp(k=3),
    "searches": gg.WPerp(k=3, refresh=1),
}
CASES = [(method, _plain) for method in METHODS] + [(m, _residual) for m in METHODS if m not in ("chained", "searches")]
CASES += [("searches", _softmax)]


def _most_alive(method: str, middle: Callable[[int], list[nn.Module]], depth: int, memory: str) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 32), nn.ReLU(), *middle(depth), nn.Linear(32, CLASSES))
    forward = gg.ForwardGradient(model, METHODS[method], memory=memory)
    x, t = torch.randn(17, INPUTS), torch.randint(CLASSES, (17,))
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    forward(loss_fn, x, t)
    alive = Alive(model[-1], 17)
    forward(loss_fn, x, t)
    return alive.most


@pytest.mark.parametrize(("method", "middle"), CASES)
def test_what_is_alive_of_the_batch_does_not_grow_with_depth(method, middle):
    assert _most_alive(method, middle, 24, "replay") <= 1.1 * _most_alive(method, middle, 4, "replay")


def test_it_grows_when_layers_are_stored():
    assert _most_alive("direct", _plain, 24, "store") > 2 * _most_alive("direct", _plain, 4, "store")
