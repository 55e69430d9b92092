"""Recurrent networks that learn online from endless streams, in memory that does not grow.

`Online` steps a model and writes `.grad`. A rule says how the influence of the past is kept; one rule is one file.
"""

from gradguess.online.blockwise import Blockwise
from gradguess.online.completed import Completed
from gradguess.online.eprop import EProp
from gradguess.online.one_step import OneStep
from gradguess.online.online import Later, Online
from gradguess.online.recurrent import LRU, Recurrent
from gradguess.online.rflo import RFLO
from gradguess.online.rtrl import RTRL
from gradguess.online.rule import Rule
from gradguess.online.snap import SnAp
from gradguess.online.tbptt import TBPTT
from gradguess.online.uoro import UORO
from gradguess.online.wperp import WPerp

__all__ = ["LRU", "RFLO", "RTRL", "TBPTT", "UORO", "Blockwise", "Completed", "EProp"]
__all__ += ["Later", "OneStep", "Online", "Recurrent", "Rule", "SnAp", "WPerp"]
