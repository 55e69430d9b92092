"""Mutants of the source, run against the tests that cover them: see docs/mutants.md."""
