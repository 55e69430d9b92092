"""Train PyTorch networks without backpropagation: gradients guessed from one forward pass."""

from gradguess.capture import CapturedStep
from gradguess.diagnostics import SiteReport, diagnose
from gradguess.errors import ForwardModeError, GradguessError, InputError, NonFiniteError
from gradguess.estimate import ForwardGradient, estimate
from gradguess.feedback import Feedback
from gradguess.guesses import (
    ActivationPerturbation,
    Backprop,
    Estimate,
    Guess,
    WeightPerturbation,
    WPerp,
    WPerpNS,
    WPreconditioned,
    WTranspose,
)

__version__ = "0.1.0"

__all__ = [
    "ActivationPerturbation",
    "Backprop",
    "CapturedStep",
    "Estimate",
    "Feedback",
    "ForwardGradient",
    "ForwardModeError",
    "GradguessError",
    "Guess",
    "InputError",
    "NonFiniteError",
    "SiteReport",
    "WPerp",
    "WPerpNS",
    "WPreconditioned",
    "WTranspose",
    "WeightPerturbation",
    "diagnose",
    "estimate",
]
