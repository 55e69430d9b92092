"""One step: draw directions, measure them, pull the estimates back to the parameters. All of it is pure.

refresh     what a guess keeps, every `refresh` steps
draw        directions at a site
measure     the tangent passes
pull_back   from estimates at the sites to the gradients of the parameters
gradients   where these go
split       a batch in chunks;  processes: a batch that several processes share
"""
