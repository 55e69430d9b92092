"""Methods: how directions and measurements become an estimate of the gradient."""

from gradguess.methods.backprop import Backprop
from gradguess.methods.base import Draws, Estimate, Method
from gradguess.methods.feedback import Feedback
from gradguess.methods.guessed import Guessed
from gradguess.methods.students import LocalGuess, Students
from gradguess.methods.weight import WeightPerturbation

__all__ = [
    "Backprop",
    "Draws",
    "Estimate",
    "Feedback",
    "Guessed",
    "LocalGuess",
    "Method",
    "Students",
    "WeightPerturbation",
]
