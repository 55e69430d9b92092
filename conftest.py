"""Triton is for Linux: elsewhere its kernels cannot even be imported."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["src/gradguess/backends/triton_*.py"]
