"""Thin bridges to other packages. Each module imports its package, and no other module does."""
