"""One step: draw directions, measure them, pull the estimates back to the parameters. All of it is pure.

base        what a step is given, and where gradients go
refresh     what a guess keeps, every `refresh` steps
measure     directions at the sites, and the tangent passes that carry them
pull_back   from estimates at the sites to the gradients of the parameters
parts       a batch in chunks, or one that several processes share
saved       the state of a run as a flat dict
"""
