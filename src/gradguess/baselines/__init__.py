"""Rivals behind the interface of guesses and feedback, one file each: what else trains a network, to compare with."""

from gradguess.baselines.checkpointed import Checkpointed
from gradguess.baselines.dfa import DFA
from gradguess.baselines.fdfa import FDFA
from gradguess.baselines.frozen import Frozen
from gradguess.baselines.local_linear import LocalLinear
from gradguess.baselines.mezo import MeZO
from gradguess.baselines.predsim import PredSim

__all__ = ["DFA", "FDFA", "Checkpointed", "Frozen", "LocalLinear", "MeZO", "PredSim"]
