"""One step: draw directions, measure them, pull the estimates back to the parameters. All of it is pure.

refresh     what a guess keeps, every `refresh` steps
draw        directions at a site
measure     the tangent passes
pull_back   from estimates at the sites to the gradients of the parameters
split       a batch in chunks;  processes: a batch that several processes share
"""

from gradguess.step.base import Options, State, Step
from gradguess.step.draw import Drawing
from gradguess.step.measure import Measurement, Record, Records, measure
from gradguess.step.processes import ALONE, Pool
from gradguess.step.pull_back import Gradients, pull_back

__all__ = [
    "ALONE",
    "Drawing",
    "Gradients",
    "Measurement",
    "Options",
    "Pool",
    "Record",
    "Records",
    "State",
    "Step",
    "measure",
    "pull_back",
]
