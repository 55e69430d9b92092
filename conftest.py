"""Triton is for Linux, and Hugging Face's package is an extra: without them some modules cannot even be imported."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["src/gradguess/backends/triton_*.py"]
if not find_spec("transformers"):
    collect_ignore_glob += ["src/gradguess/integrations/huggingface.py"]
