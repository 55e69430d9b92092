"""Thin bridges to other packages; each module imports its package, nothing else does."""
