"""Results in, tables and figures out: pure functions that read no files and draw nothing.

A table is a function from results to rows, under `@table(slug, title, caption)`; a figure is a function to a `Figure`.
`gradguess_lab.report.sections` names those that the report shows.
"""
