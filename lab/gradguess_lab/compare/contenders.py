"""What is compared. To add a method of `experiments.methods`, or a variant, add a line to `CONTENDERS`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Sends = Literal["nothing", "one piece", "all"]


@dataclass(frozen=True)
class Contender:
    """How a method or variant of `experiments.methods` takes part.

    Attributes:
        sends: through how much of the network a signal travels back from the loss. Numbers for each sample, and an
            output error that matrices or heads take straight to a site, do not travel through the network.
        pieces: the network is cut as the task says; otherwise sites are where the method puts them by itself.
        control: not a way to train, but what a method must beat.
    """

    sends: Sends
    pieces: bool = False
    control: bool = False


CONTENDERS: dict[str, Contender] = {
    "backprop": Contender("all"),
    "checkpointed": Contender("all", pieces=True),
    "students": Contender("nothing", pieces=True),
    "students-chained": Contender("one piece", pieces=True),
    "students-error": Contender("nothing", pieces=True),
    "students-tangents": Contender("nothing", pieces=True),
    "local-guess": Contender("nothing", pieces=True),
    "local-linear": Contender("nothing", pieces=True),
    "local-predsim": Contender("nothing", pieces=True),
    "feedback-chained": Contender("one piece", pieces=True),
    "feedback-direct": Contender("nothing"),
    "fdfa": Contender("nothing"),
    "dfa": Contender("nothing"),
    "wperp": Contender("nothing"),
    "wperp-exact": Contender("nothing"),
    "activation": Contender("nothing"),
    "weight": Contender("nothing"),
    "mezo": Contender("nothing"),
    "students-random": Contender("nothing", pieces=True, control=True),
    "pieces-zero": Contender("one piece", pieces=True, control=True),
    "frozen": Contender("nothing", pieces=True, control=True),
}
