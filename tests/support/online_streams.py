"""Small streams, models and slow twins for the tests of `gradguess.online`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradguess import online as ol

CELLS: dict[str, Callable[[], nn.Module]] = {
    "rnn": lambda: ol.Recurrent(nn.RNNCell(3, 5), nn.Linear(5, 2)),
    "relu": lambda: ol.Recurrent(nn.RNNCell(3, 5, nonlinearity="relu"), nn.Linear(5, 2)),
    "gru": lambda: ol.Recurrent(nn.GRUCell(3, 4), nn.Linear(4, 2)),
    "lstm": lambda: ol.Recurrent(nn.LSTMCell(3, 3), nn.Linear(3, 2)),
    "stack": lambda: ol.Recurrent([nn.GRUCell(3, 3), nn.RNNCell(3, 4)], nn.Linear(4, 2)),
    "lru": lambda: ol.Recurrent(ol.LRU(3, 4), nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 2))),
    "own": lambda: Own(),
}


RULES = [
    *(ol.RTRL(), ol.WPerp(2, refresh=2), ol.Completed(ol.WPerp(2, refresh=2)), ol.SnAp(1), ol.UORO(), ol.RFLO()),
    *(ol.EProp(), ol.TBPTT(3), ol.Blockwise(ol.WPerp(2, refresh=3)), ol.OneStep()),
]
EXACT = [  # on short streams of small models
    *(ol.RTRL(), ol.WPerp(50), ol.SnAp(3), ol.TBPTT(9), ol.Completed(ol.WPerp(2, refresh=2), ol.SnAp(3))),
    ol.Blockwise(ol.WPerp(50, refresh=3)),
]


def rule_name(rule: ol.Rule) -> str:
    return type(rule).__name__


class Own(nn.Module):
    """A module of a user: a state that is a dict with a counter, and an output that does not come from the state."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.leak, self.out = nn.Linear(3 + 4, 4), nn.Parameter(torch.rand(4)), nn.Linear(3 + 4, 2)

    def initial_state(self, streams: int) -> dict[str, Tensor]:
        m = self.leak.new_full((streams, 2, 2), 0.1).detach()
        return {"count": torch.zeros(streams, dtype=torch.long), "m": m}

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        before = state["m"].flatten(1)
        leak = torch.sigmoid(self.leak)
        m = leak * before + (1 - leak) * torch.tanh(self.mix(torch.cat([x, before], 1)))
        output = self.out(torch.cat([x, m + before], 1))
        return output, {"count": state["count"] + 1, "m": m.view(-1, 2, 2)}


def model(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return CELLS[name]().double()


def stream(steps: int, streams: int = 3, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(streams, 3, generator=generator, dtype=torch.double),
            torch.randn(streams, 2, generator=generator, dtype=torch.double),
        )
        for _ in range(steps)
    ]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean(1)


def grads(network: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def through_the_stream(network: nn.Module, data: Sequence[tuple[Tensor, Any]]) -> dict[str, Tensor]:
    """The slow twin: one graph over all steps, and the gradient of the sum of all losses. `None` is no loss."""
    network.zero_grad()
    state = network.initial_state(len(data[0][0]))
    total = torch.zeros((), dtype=torch.double)
    for x, target in data:
        output, state = network(x, state)
        if target is not None:
            total = total + loss_fn(output, target).mean()
    total.backward()
    return grads(network)


def online(network: nn.Module, rule: ol.Rule, data: Sequence[tuple[Tensor, Any]], seed: int = 0) -> dict[str, Tensor]:
    """The sum of the gradients that `Online` adds, with frozen weights."""
    network.zero_grad()
    learner = ol.Online(network, rule, seed)
    for x, target in data:
        learner(loss_fn, x, target)
    return grads(network)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def one_step_jacobians(network: nn.Module, x: Tensor, h: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """J (n, n) and F (n, size) of one stream of a model whose state is one tensor, row by row."""
    leaf = h.detach()[None].requires_grad_()
    recurrent = {name: p for name, p in network.named_parameters() if name.startswith("cells")}
    after = network(x[None], leaf)[1][0]
    rows = [torch.autograd.grad(unit, [leaf, *recurrent.values()], retain_graph=True) for unit in after]
    J = torch.stack([row[0][0] for row in rows])
    F = {name: torch.stack([row[i + 1].flatten() for row in rows]) for i, name in enumerate(recurrent)}
    return J, F


def with_influence(
    network: nn.Module,
    data: Sequence[tuple[Tensor, Tensor]],
    carry: Callable[[str, Tensor, Tensor, Tensor], Tensor],
) -> dict[str, Tensor]:
    """The slow twin of a rule: the influence of each stream as a dense matrix, `P = carry(name, J, P, F)`."""
    network.zero_grad()
    streams = len(data[0][0])
    h, P = network.initial_state(streams), [{} for _ in range(streams)]
    for x, target in data:
        leaf = h.detach().requires_grad_()
        output, after = network(x, leaf)
        loss_fn(output, target).mean().backward()
        for b in range(streams):
            for name, value in P[b].items():
                p = network.get_parameter(name)
                p.grad += (leaf.grad[b] @ value).view_as(p)
            J, F = one_step_jacobians(network, x[b], h[b])
            P[b] = {name: carry(name, J, P[b].get(name, torch.zeros_like(f)), f) for name, f in F.items()}
        h = after.detach()
    return grads(network)
