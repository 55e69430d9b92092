"""Which method to train a model with on this machine: a few steps of each, a table and a recommendation."""

from gradguess.advise.advice import Advice, Row
from gradguess.advise.advise import advise

__all__ = ["Advice", "Row", "advise"]
