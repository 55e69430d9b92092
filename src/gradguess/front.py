"""The public names: what `gradguess` shows as its own."""

import gradguess.baselines as baselines
import gradguess.online as online
from gradguess.advise import advise
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
from gradguess.methods import Backprop, Estimate, Feedback, LocalGuess, Students, WeightPerturbation
from gradguess.passes.forward_mode import forward_mode

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
    "LocalGuess",
    "NonFiniteError",
    "SiteReport",
    "Students",
    "WPerp",
    "WPerpNS",
    "WPreconditioned",
    "WTranspose",
    "WeightPerturbation",
    "advise",
    "baselines",
    "diagnose",
    "estimate",
    "forward_mode",
    "online",
]
