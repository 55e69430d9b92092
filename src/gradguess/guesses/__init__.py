"""The guesses: one method, one file. `Guess`, `Frame` and `SiteView` are the bases for one of your own."""

from gradguess.guesses.activation import ActivationPerturbation
from gradguess.guesses.base import Guess, SiteView
from gradguess.guesses.frames import Columns, Frame, GatedBasis, Identity, Matrix, OpenGate, Transposed
from gradguess.guesses.perp import WPerp
from gradguess.guesses.perp_ns import WPerpNS
from gradguess.guesses.preconditioned import WPreconditioned
from gradguess.guesses.transpose import WTranspose

__all__ = [
    "ActivationPerturbation",
    "Columns",
    "Frame",
    "GatedBasis",
    "Guess",
    "Identity",
    "Matrix",
    "OpenGate",
    "SiteView",
    "Transposed",
    "WPerp",
    "WPerpNS",
    "WPreconditioned",
    "WTranspose",
]
