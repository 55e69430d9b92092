"""Recurrent networks that learn online from endless streams, in memory that does not grow.

`Online` steps a model and writes `.grad`. A `Rule` says how the influence of the past is kept.
"""

from gradguess.online.basis_rules import Blockwise, Completed, WPerp
from gradguess.online.online import Later, Online
from gradguess.online.recurrent import LRU, Recurrent
from gradguess.online.rules import RFLO, RTRL, TBPTT, UORO, EProp, OneStep, Rule, SnAp

__all__ = ["LRU", "RFLO", "RTRL", "TBPTT", "UORO", "Blockwise", "Completed", "EProp"]
__all__ += ["Later", "OneStep", "Online", "Recurrent", "Rule", "SnAp", "WPerp"]
