"""The result of a diagnosis: numbers per site, as objects, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class SiteReport:
    """One site (one parameter, for weight perturbation). See `gradguess.diagnose` for the definitions.

    Attributes:
        d: numbers per sample at the site.
        bias: as in the paper, with the gradient of the mean loss.
        variance: the same.
        covariance_norm: `‖Cov(y) - I‖_F / d`, averaged over the batch; None for a method without a covariance.
        cosine: between one estimate and the true gradient, over the whole batch at once (saturated samples have a
            gradient of zero); 0 if either is zero.
        mean_cosine: the same for the estimate's expectation.
        gradient_norm: `‖d(mean loss)/ds‖_F` over the whole batch.
        rank: numerical rank of `W̃`, averaged over the probe samples.
        singular_values: of `W̃`, d of them with zeros at the end, averaged over the probe samples.
        overlap: `overlap[k - 1]` is the part of the true gradient's norm that lies in the top-k right singular vectors
            of `W̃`, averaged over the probe samples with a gradient; beyond the rank the curve is flat.

    `rank`, `singular_values` and `overlap` are None where `W̃` is not defined (nothing above the site, or an output that
    the batch shares), where it is too large to decompose (above 2²¹ entries per sample), and with `curve=False`.
    """

    d: int
    bias: float
    variance: float
    covariance_norm: float | None
    cosine: float
    mean_cosine: float
    gradient_norm: float
    rank: float | None = None
    singular_values: tuple[float, ...] | None = None
    overlap: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Report(Mapping[str, SiteReport]):
    """A `SiteReport` for every site, by name, in the order of the forward pass."""

    sites: dict[str, SiteReport]

    def __getitem__(self, name: str) -> SiteReport:
        return self.sites[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Numbers, lists and None alone, for JSON."""
        return {
            name: {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(site).items()}
            for name, site in self.items()
        }

    def table(self) -> str:
        """All numbers but the curves, as plain text."""
        columns = [f.name for f in fields(SiteReport) if f.name not in ("singular_values", "overlap")]
        rows = [["site", *(name.replace("_", " ") for name in columns)]]
        return aligned(rows + [[name, *(shown(getattr(site, key)) for key in columns)] for name, site in self.items()])


def cosine(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The cosine between all numbers of the first tensors and all of the second; 0 if either are zero."""
    inner = square = true_square = 0.0
    for a, b in pairs:
        inner, square = inner + (a * b).sum().item(), square + a.square().sum().item()
        true_square += b.square().sum().item()
    return inner / (square**0.5 * true_square**0.5) if square and true_square else 0.0


def shown(value: float | None, form: str = ".3g") -> str:
    return "–" if value is None else format(value, form)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as plain text, the first column to the left and the others to the right. Shorter rows widen no column."""
    whole = [row for row in rows if len(row) == len(rows[0])]
    first, widths = max(len(row[0]) for row in rows), [max(map(len, column)) for column in zip(*whole, strict=True)]
    return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
