"""What a guess is.

A guess is a random map from a site to a direction `y` of the shape of the site's output. Every guess of the paper
is linear in white noise, `y = A z` with `z ~ N(0, I)`, so it is given by its `Frame`, the map `A` of every sample:

    covariance of y    Cov(y) = A Aᵀ
    bias               E[c y] - g = (Cov(y) - I) g         (eq. 5 of the paper)

To add one: subclass `Guess`, implement `frame`, and return one of the frames of `gradguess.guesses.frames`, or your
own. A guess that looks for something now and then, such as a basis, also implements `search`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradguess.guesses.frames import Frame
from gradguess.jacobian import Jacobian
from gradguess.layers.positions import FULL, Pattern
from gradguess.model.site import LayoutChanged
from gradguess.noise import Noise

SIZED = ("basis", "start")  # names under which `search` keeps tensors with one row for each number of the site


class StaleBasis(LayoutChanged):
    """What was kept is of another size (a longer sequence, a larger image), or of a layer of another kind: all of it
    must be found again.
    """


def still_fitting(kept: Mapping[str, Tensor], d: int, dtype: torch.dtype) -> Mapping[str, Tensor] | None:
    """What was kept, in the dtype that the model has now; None if it was found at a site of another size than `d`."""
    if any(kept[key].shape[0] != d for key in SIZED if key in kept):
        return None
    return {key: value.to(dtype) for key, value in kept.items()}


@dataclass(frozen=True)
class SiteView:
    """What a guess may look at: one site with something above it, on one batch.

    Attributes:
        name: the name of the site.
        output: `s`, (batch, d).
        gate: the derivative of the elementwise function that follows, (batch, d); None where there is none.
        binary: the gate is zero or one.
        kept: what `search` found last.
        noise: for `search`; it does not shift the numbers that directions are drawn from.
        jacobian: a function that makes `W`.
        pattern: where positions and features lie in a row of `output`.
    """

    name: str
    output: Tensor
    gate: Tensor | None
    binary: bool
    kept: Mapping[str, Tensor]
    noise: Noise
    jacobian: Callable[[], Jacobian] = field(repr=False)
    pattern: Pattern = FULL

    @property
    def W(self) -> Jacobian:
        """The Jacobian above, `W̃`."""
        return self.jacobian()

    def found(self, key: str) -> Tensor:
        """What `search` found under this name."""
        if key not in self.kept:  # the layer above was another one then
            raise StaleBasis
        return self.kept[key]


class Guess(ABC):
    """A way to draw a direction at every site. Subclasses implement `frame`, and `search` where something is kept.

    Attributes:
        reads: when the guess looks at the Jacobian `view.W`: "never", in "search" alone, or in "frame".
        searches: whether the guess implements `search`.
        multiplies: whether `search` asks `view.W` for products `W̃ v`. Where it does not, attention above needs no
            matrix of all pairs of positions.
        rows: of the Jacobians by random vectors, so many as a search asks for where a basis has no closed form.
        refresh: steps between two searches.
        steady: whether every step does the same operations on the same shapes, whatever the numbers are. Such steps
            can be recorded once and replayed.
    """

    reads: ClassVar[Literal["never", "search", "frame"]] = "frame"
    searches: ClassVar[bool] = False
    multiplies: ClassVar[bool] = True
    steady: ClassVar[bool] = True
    rows: ClassVar[int] = 256
    refresh: int = 1

    def reads_gate(self, pattern: Pattern) -> bool:
        """Whether `frame` looks at the gate of a site with these positions."""
        return True

    @abstractmethod
    def frame(self, view: SiteView) -> Frame:
        """The map from white noise to this guess's directions at a site."""

    def search(self, view: SiteView) -> dict[str, Tensor]:
        """Find what `frame` will see as `view.kept` until the next search, `refresh` steps later.

        Here `view` shows a few samples of the batch, but `view.W.shared_basis` is that of the whole batch. Make tensors
        on `view.output.device`: PyTorch's default device does not count here.
        """
        return {}

    def search_all(self, views: Sequence[SiteView]) -> list[dict[str, Tensor]]:
        """`search` at several sites: one after the other, unless a guess can do better."""
        return [self.search(view) for view in views]
