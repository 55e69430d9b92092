"""The page's numbers against the library's: the same weights, the same noise, float64 on both sides."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.noise import Noise

pytestmark = pytest.mark.slow

CLOSE = 1e-10
SIZES = (2, 12, 9, 3)  # the layer above a site is narrower than it: W^P is not activation perturbation
TALL = (2, 6, 10, 3)  # and wider
BATCH, K = 7, 4
SITES = ("0", "2", "4")
LOSS = nn.CrossEntropyLoss(reduction="none")
GUESSES: dict[str, gg.Guess] = {
    "activation": gg.ActivationPerturbation(),
    "wt": gg.WTranspose(),
    "wperp": gg.WPerp(k=K, solver="svd"),
    "wp": gg.WPreconditioned(),
}
METHODS: dict[str, Any] = {"backprop": gg.Backprop(), "weight": gg.WeightPerturbation(), **GUESSES}
TANGENTS = (1, 6)  # fewer than k; more than k
DOUBLE = torch.float64, torch.device("cpu")

# The page takes noise as a list of numbers, which a function hands out one by one.
PRELUDE = """
  const G = window.gradguess, values = a.noise ?? [];
  let next = 0;
  const noise = () => { if (next >= values.length) throw new Error("too little noise"); return values[next++]; };
  const used = () => { if (next !== values.length) throw new Error("too much noise"); };
"""


def run(tab: Any, body: str, **arguments: Any) -> Any:
    return tab.evaluate(f"(a) => {{ {PRELUDE} {body} }}", arguments)


def network(sizes: tuple[int, ...] = SIZES, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [(nn.Linear(a, b, dtype=torch.float64), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain(*layers))[:-1]


def batch(count: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 2, generator=generator, dtype=torch.float64), torch.arange(count) % 3


def parameters(model: nn.Module) -> dict[str, Any]:
    return {
        "weights": [p.tolist() for name, p in model.named_parameters() if name.endswith("weight")],
        "biases": [p.tolist() for name, p in model.named_parameters() if name.endswith("bias")],
    }


def flat(tree: dict[str, Any]) -> list[Tensor]:
    """The page's parameters in the order of `named_parameters`."""
    pairs = zip(tree["weights"], tree["biases"], strict=True)
    return [torch.tensor(p, dtype=torch.float64) for pair in pairs for p in pair]


def jacobians(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """`W̃ = W D` above both hidden layers, for every sample: (batch, m, d)."""
    found = []
    for i in (0, 2):
        gate = (model[: i + 1](x) > 0).double()
        found.append(model[i + 2].weight.detach() * gate[:, None, :])
    return found


def signs(W: Tensor, k: int) -> Tensor:
    """What turns the signs of torch's singular vectors into the page's: (batch, k). The largest entry is positive."""
    V = torch.linalg.svd(W, full_matrices=False)[2][:, :k]
    return V.gather(-1, V.abs().argmax(-1, keepdim=True))[..., 0].sign()


def white(method: str, model: nn.Sequential, x: Tensor, tangents: int, generator: torch.Generator) -> list[float]:
    """The numbers that the library draws from this generator in one step, in the order in which the page takes them."""
    noise = Noise(generator)
    if method == "backprop":
        return []
    if method == "weight":
        shapes = [p.shape for _ in range(tangents) for p in model.parameters()]
        return torch.cat([noise.normal(shape, *DOUBLE).flatten() for shape in shapes]).tolist()
    drawn = []
    for W in jacobians(model, x):
        m, d = W.shape[1:]
        latent = {"activation": d, "wt": m, "wperp": min(K, m, d), "wp": min(m, d)}[method]
        z = noise.batched(tangents, len(x), latent, *DOUBLE)
        drawn.append(z * signs(W, latent) if method == "wperp" else z)
    drawn.append(noise.batched(tangents, len(x), 3, *DOUBLE))  # N(0, I) at the top
    return torch.cat([z.flatten() for z in drawn]).tolist()


def options(method: str, tangents: int = 1, isolate: bool = False) -> dict[str, Any]:
    return {"method": method, "k": K, "tangents": tangents, "isolate": isolate, "rate": 0.01}


def assert_close(found: Any, expected: Any) -> None:
    found, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (found, expected))
    assert found.shape == expected.shape
    assert (found - expected).abs().max().item() <= CLOSE


SEEN = "const batch = a.x.map((x, b) => G.forward(a.network, x, a.t[b]));"


@pytest.mark.parametrize("sizes", [SIZES, TALL], ids=["narrower", "wider"])
@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("tangents", TANGENTS)
@pytest.mark.parametrize("method", GUESSES)
def test_directions_and_estimates(tab, method, tangents, isolate, sizes):
    model, (x, t) = network(sizes), batch()
    guess, generator = GUESSES[method], torch.Generator().manual_seed(3)
    noise = white(method, model, x, tangents, generator)
    expected = gg.estimate(model, guess, LOSS, x, t, tangents, generator=generator.manual_seed(3), isolate=isolate)
    body = "const out = G.guessed(a.network, batch, a.options, noise); used(); return [out, batch.map((s) => s.loss)];"
    found = run(
        tab, SEEN + body,
        network=parameters(model), x=x.tolist(), t=t.tolist(), options=options(method, tangents, isolate), noise=noise,
    )  # fmt: skip
    samples, losses = found
    assert_close(losses, expected.losses)
    for i, site in enumerate(SITES):
        y = torch.tensor([sample["directions"][i] for sample in samples], dtype=torch.float64)
        assert_close(y.transpose(0, 1), expected.directions[site])
        assert_close([sample["estimates"][i] for sample in samples], expected.site_grads[site])
    if not isolate:
        c = torch.tensor([sample["derivatives"] for sample in samples], dtype=torch.float64)
        assert_close(c[:, :: len(SITES)].mT, expected.jvp)


@pytest.mark.parametrize("sizes", [SIZES, TALL], ids=["narrower", "wider"])
@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("method", GUESSES)
def test_exact_moments_are_those_of_diagnose(tab, method, isolate, sizes):
    model, (x, t) = network(sizes), batch(1)
    report = gg.diagnose(model, GUESSES[method], LOSS, x, t, isolate=isolate)
    for i, site in enumerate(SITES[:2]):
        body = """
          const seen = G.forward(a.network, a.x, a.t), g = G.trueGradients(a.network, seen)[a.site];
          const W = G.jacobianAbove(a.network, seen, a.site);
          return [G.exactMoments(a.network, seen, a.site, a.options), G.overlap(W, g)];
        """
        found, space = run(
            tab, body, network=parameters(model), x=x[0].tolist(), t=0, site=i, options=options(method, 1, isolate)
        )
        expected = report[site]
        assert_close(found["bias"], expected.bias)
        assert_close(found["variance"], expected.variance)
        assert_close(found["cosine"], expected.mean_cosine)
        assert_close(found["length"], expected.gradient_norm)
        count = len(space["values"])
        assert_close(space["values"], expected.singular_values[:count])
        assert_close(space["curve"], expected.overlap[:count])


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("tangents", [3])
@pytest.mark.parametrize("method", GUESSES)
def test_exact_moments_with_several_tangents_are_those_of_many_estimates(tab, method, tangents, isolate):
    """Budget: 40,000 estimates of the library; within 6 standard errors, every coordinate."""
    model, (x, t), count = network(), batch(1), 40_000
    estimates = gg.estimate(
        model, GUESSES[method], LOSS, x.expand(count, -1), t.expand(count), tangents,
        generator=torch.Generator().manual_seed(5), isolate=isolate,
    ).site_grads["0"]  # fmt: skip
    body = "return G.exactMoments(a.network, G.forward(a.network, a.x, a.t), 0, a.options);"
    found = run(tab, body, network=parameters(model), x=x[0].tolist(), t=0, options=options(method, tangents, isolate))
    mean, variances = (torch.tensor(found[key], dtype=torch.float64) for key in ("mean", "variances"))
    squares = (estimates - mean).square()
    for values, expected in ((estimates, mean), (squares, variances)):
        error = (values.mean(0) - expected).abs()
        assert (error <= 6 * values.std(0) / count**0.5 + 1e-12).all()


@pytest.mark.parametrize("method", METHODS)
def test_training_steps(tab, method):
    model, (x, t), steps = network(), batch(), 3
    start = parameters(model)
    forward = gg.ForwardGradient(model, METHODS[method], seed=7)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-6)
    generator, noise, losses = torch.Generator().manual_seed(7), [], []
    for _ in range(steps):
        noise += white(method, model, x, 1, generator)
        optimiser.zero_grad()
        losses.append(forward(LOSS, x, t).item())
        optimiser.step()
    body = """
      const runner = G.startRunner(a.network), losses = [];
      for (let i = 0; i < a.steps; i++) losses.push(G.trainStep(runner, a.x, a.t, a.options, noise).loss);
      used();
      return [runner.network, losses];
    """
    found = run(tab, body, network=start, x=x.tolist(), t=t.tolist(), options=options(method), steps=steps, noise=noise)
    assert_close(found[1], losses)
    for ours, theirs in zip(flat(found[0]), model.parameters(), strict=True):
        assert_close(ours, theirs.detach())
