"""Data, models and training runs: what reproduces the paper. Imports the library, never the reverse."""
