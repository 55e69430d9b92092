"""The guesses: one method, one file."""

from gradguess.guesses._base import Estimate, Frame, Guess, Method, SiteView
from gradguess.guesses.activation import ActivationPerturbation
from gradguess.guesses.backprop import Backprop
from gradguess.guesses.perp import WPerp
from gradguess.guesses.perp_ns import WPerpNS
from gradguess.guesses.preconditioned import WPreconditioned
from gradguess.guesses.transpose import WTranspose
from gradguess.guesses.weight import WeightPerturbation

__all__ = [
    "ActivationPerturbation",
    "Backprop",
    "Estimate",
    "Frame",
    "Guess",
    "Method",
    "SiteView",
    "WPerp",
    "WPerpNS",
    "WPreconditioned",
    "WTranspose",
    "WeightPerturbation",
]
