"""Results in, tables and figures out: pure functions that read no files and draw nothing.

To add a table or a figure to the report, write a function from runs to a `Table` (or a `Figure`) in a file of its own
here, and name it in `gradguess_lab.report.sections`.
"""
