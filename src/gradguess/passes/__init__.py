"""How the model is run. Everything else sees a model through the passes of this package."""

from gradguess.passes.base import Carried, Draw, Pass, Scale
from gradguess.passes.choose import choose_pass

__all__ = ["Carried", "Draw", "Pass", "Scale", "choose_pass"]
