"""The errors a user can see. Each says what was expected, what was found and what to do."""

from __future__ import annotations


class GradguessError(Exception):
    """Base of every error that gradguess raises on purpose."""


class InputError(GradguessError, ValueError):
    """An argument, a model or a loss that gradguess cannot work with."""


class ForwardModeError(GradguessError, NotImplementedError):
    """A layer through which PyTorch cannot carry a tangent."""


class NonFiniteError(GradguessError, ArithmeticError):
    """A loss or a directional derivative that is NaN or infinite."""
