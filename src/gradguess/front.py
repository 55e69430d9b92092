"""The public names: what `gradguess` shows as its own."""

import gradguess.online as online
from gradguess.captured_step import CapturedStep
from gradguess.diagnose import SiteReport, diagnose
from gradguess.errors import ForwardModeError, GradguessError, InputError, NonFiniteError
from gradguess.estimate import ForwardGradient, estimate
from gradguess.guesses import (
    ActivationPerturbation,
    Guess,
    WPerp,
    WPerpNS,
    WPreconditioned,
    WTranspose,
)
from gradguess.methods import Backprop, Estimate, Feedback, WeightPerturbation

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
    "online",
]
