"""Triton is for Linux, and other packages are extras: without them some modules cannot even be imported."""

from importlib.util import find_spec

_NEED = {
    "triton": "backends/triton_*.py",
    "transformers": "integrations/huggingface.py",
    "lightning": "integrations/estimate_quality.py",
}
collect_ignore_glob = [f"src/gradguess/{path}" for package, path in _NEED.items() if not find_spec(package)]
