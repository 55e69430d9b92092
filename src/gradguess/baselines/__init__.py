"""Rivals behind the interface of guesses and feedback: other methods that train a network, to compare with."""

from gradguess.baselines.checkpointed import Checkpointed
from gradguess.baselines.feedback_alignment import DFA, FDFA
from gradguess.baselines.local_losses import Frozen, LocalLinear, PredSim
from gradguess.baselines.mezo import MeZO

__all__ = ["DFA", "FDFA", "Checkpointed", "Frozen", "LocalLinear", "MeZO", "PredSim"]
