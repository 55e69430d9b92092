"""Recurrent networks that learn online from endless streams, in memory that does not grow.

`Online` steps a model and writes `.grad`. A `Rule` says how the influence of the past is kept.
"""

from gradguess.online.blockwise import Blockwise
from gradguess.online.completed import Completed
from gradguess.online.online import Later, Online
from gradguess.online.recurrent import LRU, Recurrent
from gradguess.online.rtrl import RTRL
from gradguess.online.rule import OneStep, Rule
from gradguess.online.tbptt import TBPTT
from gradguess.online.trace_rules import RFLO, EProp, SnAp
from gradguess.online.uoro import UORO
from gradguess.online.wperp import WPerp

__all__ = ["LRU", "RFLO", "RTRL", "TBPTT", "UORO", "Blockwise", "Completed", "EProp"]
__all__ += ["Later", "OneStep", "Online", "Recurrent", "Rule", "SnAp", "WPerp"]
