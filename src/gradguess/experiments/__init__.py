"""Data, models and training runs: everything that reproduces the paper. Imports the library, never the reverse."""
