"""Fit the nine coefficient sets of W⊥-NS and draw them.

    python scripts/fit_newton_schulz.py          # fit, write the sets into step_polynomials.py, draw (two minutes)
    python scripts/fit_newton_schulz.py --draw   # only the figure

Gradient descent (Adam, float64) on the four coefficients of `p`, with `p^5` on a grid over [0, 1.1]. The loss is

    mean square error on [0, 1] without |x - σ| < 0.02
    + 0.1 × (8-norm of the error on [0, 1] without |x - σ| < 0.05)²         for the largest errors
    + 0.1 × mean square error on [1, 1.1]                                   for norms that are underestimated

Starts: polynomials with `p(σ) ≈ σ`, `p(1) ≈ 1`, `p'(1) ≈ 0` and a random slope at σ, all perturbed; the best 32 of 4096
go down, the best of these is kept. Seeded: the same machine and torch version give the same file.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from gradguess.linalg.step_polynomials import SETS, Coefficients, CoefficientSet

ROOT = Path(__file__).resolve().parents[1]
MODULE = ROOT / "src" / "gradguess" / "linalg" / "step_polynomials.py"
FIGURE = ROOT / "docs" / "figures" / "newton_schulz"
NARROW = 0.02  # half the band left out of the mean square error
STEPS = 5  # how often `p` is applied; the sets are fitted for this number
BAND = 0.05  # half the width of the transition around σ in which the largest errors are not counted


def evaluate(x: ArrayLike, a: Coefficients, steps: int = STEPS) -> NDArray[np.float64]:
    """`p` applied `steps` times to numbers: what W⊥-NS does to singular values."""
    y = np.asarray(x, dtype=np.float64)
    for _ in range(steps):
        square = y * y
        y = y * (a[0] + square * (a[1] + square * (a[2] + square * a[3])))
    return y


def measure(sigma: float, a: Coefficients) -> CoefficientSet:
    """A set with the place and the width of its step, on a grid of spacing 1e-4."""
    x = np.arange(11001) / 10000
    y = evaluate(x, a)
    crossing = int(np.argmax(y >= 0.5))
    start = crossing - int(np.argmax(y[crossing::-1] < 0.1))
    end = crossing + int(np.argmax(y[crossing:] > 0.9))
    return CoefficientSet(sigma, a, float(x[crossing]), (end - start) / 10000)


def errors(entry: CoefficientSet) -> dict[str, float]:
    """The errors that a set reaches, on the same grid.

    `low` is the largest `|p^5|` on `[0, σ - 0.05]`, `high` the largest `|p^5 - 1|` on `[σ + 0.05, 1]`, `overshoot` that
    on `[1, 1.1]`, and `rms` the root mean square of `p^5 - f_σ` over all of `[0, 1]`, the transition included.
    """
    x = np.arange(11001) / 10000
    y, inside = evaluate(x, entry.coefficients), x <= 1
    error = np.abs(y - (x > entry.sigma + 1e-9))
    return {
        "low": float(error[x <= entry.sigma - BAND + 1e-9].max()),
        "high": float(error[inside & (x >= entry.sigma + BAND - 1e-9)].max()),
        "rms": float(np.sqrt(np.mean(error[inside] ** 2))),
        "overshoot": float(np.abs(y[x >= 1] - 1).max()),
    }


def iterate(a: Tensor, x: Tensor) -> Tensor:
    """`p^5` of each candidate (R, 4) at each x (n,), kept finite: (R, n)."""
    y = x.expand(len(a), -1)
    for _ in range(STEPS):
        square = y * y
        y = y * (a[:, :1] + square * (a[:, 1:2] + square * (a[:, 2:3] + square * a[:, 3:])))
        y = y.clamp(-2, 2)
    return y


def loss(a: Tensor, x: Tensor, sigma: float) -> Tensor:
    """One loss per candidate: (R,)."""
    error = iterate(a, x) - (x > sigma).to(x)
    inside, distance = x <= 1, (x - sigma).abs()
    mean = error[:, inside & (distance >= NARROW)].square().mean(1)
    largest = error[:, inside & (distance >= BAND)].pow(8).mean(1).add(1e-30).pow(0.25)
    return mean + 0.1 * largest + 0.1 * error[:, ~inside].square().mean(1)


def starts(sigma: float, count: int, rng: torch.Generator) -> Tensor:
    """Perturbed polynomials with a fixed point at σ of random slope, and a flat one at 1: (count, 4)."""
    odd = torch.tensor([1, 3, 5, 7], dtype=torch.float64)
    points = torch.tensor([sigma, 1.0], dtype=torch.float64)[:, None]
    conditions = torch.cat([points**odd, odd * points ** (odd - 1)])  # p(σ), p(1), p'(σ), p'(1)
    values = torch.tensor([sigma, 1.0, 0.0, 0.0], dtype=torch.float64).repeat(count, 1)
    values[:, 2] = 1.02 + 2.5 * torch.rand(count, generator=rng, dtype=torch.float64)
    a = torch.linalg.solve(conditions, values.mT).mT
    spread = 0.08 * torch.rand(count, 1, generator=rng, dtype=torch.float64)
    return a * (1 + spread * torch.randn(count, 4, generator=rng, dtype=torch.float64))


def fit(sigma: float, restarts: int = 32, iterations: int = 1200) -> Coefficients:
    """The best candidate after the descent, rounded to six decimals."""
    rng = torch.Generator().manual_seed(round(1000 * sigma))
    x = torch.linspace(0, 1.1, 441, dtype=torch.float64)
    a = starts(sigma, 4096, rng)
    a = a[loss(a, x, sigma).argsort()[:restarts]].requires_grad_()
    optimiser = torch.optim.Adam([a], lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, iterations, 1e-6)
    for _ in range(iterations):
        (grad,) = torch.autograd.grad(loss(a, x, sigma).sum(), a)
        norm = grad.norm(dim=1, keepdim=True)
        a.grad = torch.where(norm.isfinite(), grad / norm.clamp_min(1.0), 0.0)
        optimiser.step()
        schedule.step()
    best = a[loss(a, x, sigma).argmin()].tolist()
    a0, a1, a2, a3 = (round(c, 6) for c in best)
    return a0, a1, a2, a3


def write(sets: list[CoefficientSet]) -> None:
    lines = "".join(f"    {type(entry).__name__}{tuple(entry)},\n" for entry in sets)
    source = MODULE.read_text(encoding="utf-8")
    MODULE.write_text(re.sub(r"(?ms)^SETS = \(\n.*?^\)", f"SETS = (\n{lines})", source), encoding="utf-8")


def draw(sets: Sequence[CoefficientSet]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "gradguess", "svg.fonttype": "none", "font.size": 9})
    figure, (curves, below) = plt.subplots(
        2, 1, figsize=(6.4, 5.2), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    x = np.linspace(0, 1.1, 2201)
    colours = matplotlib.colormaps["cividis"](np.linspace(0, 0.85, len(sets)))
    for entry, colour in zip(sets, colours, strict=True):
        curves.plot(x, evaluate(x, entry.coefficients), color=colour, lw=1.4)
        box = {"fc": "white", "ec": "none", "pad": 0.6}
        curves.text(entry.crossing, 0.5, f"{entry.sigma:.1f}", size=8, ha="center", va="center", bbox=box)
    sigma, reached = [entry.sigma for entry in sets], [errors(entry) for entry in sets]
    below.semilogy(sigma, [e["low"] for e in reached], "v-", color="#00204d", label=f"0 on [0, σ − {BAND}]")
    below.semilogy(sigma, [e["high"] for e in reached], "^--", color="#b8860b", label=f"1 on [σ + {BAND}, 1]")
    below.semilogy(sigma, [e["overshoot"] for e in reached], "s:", color="0.5", label="1 on [1, 1.1]")
    curves.axvspan(1, 1.1, color="0.92", zorder=0, lw=0)
    for axis in (curves, below):
        axis.spines[["top", "right"]].set_visible(False)
    curves.set(xlim=(0, 1.1), ylim=(-0.15, 1.25), xlabel="singular value $x$", ylabel="$p^5(x)$")
    curves.set_title("Five Newton–Schulz steps of degree 7 as a step at σ")
    curves.tick_params(labelbottom=True)
    below.set(xlabel="σ", ylabel="largest error", ylim=(1e-5, 1))
    below.legend(frameon=False, loc=(0.42, 0.66), fontsize=8)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(FIGURE.with_suffix(".png"), dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only draw the figure")
    sets = list(SETS)
    if not parser.parse_args().draw:
        torch.set_num_threads(1)
        sets = []
        for tenths in range(1, 10):
            sigma = tenths / 10
            sets.append(measure(sigma, fit(sigma)))
            print(sets[-1], flush=True)
        write(sets)
    draw(sets)


if __name__ == "__main__":
    main()
