"""What is imported, and when: the help of the command needs no PyTorch, and `import gradguess` little beside it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import gradguess as gg
from gradguess import front

COMMANDS = ("train", "reproduce", "report", "diagnose", "stream", "bench", "compare", "advise")
SLOW = {"torch", "pandas", "matplotlib", "sklearn", "scipy", "sympy", "jinja2", "joblib", "safetensors", "transformers"}
# what PyTorch itself does not import, and compiling, plots and data need later
LATER = SLOW - {"torch"} | {"torch._dynamo", "torch._inductor", "torch._functorch.compile_utils", "triton", "lightning"}
PROGRAM = f"""
import contextlib, json, sys
note = lambda: print('\\n@' + json.dumps(sorted(sys.modules)))
import gradguess_lab.cli
for arguments in {[[], *([name] for name in COMMANDS)]!r}:
    sys.argv = ['gradguess', *arguments, '--help']
    with contextlib.suppress(SystemExit):
        gradguess_lab.cli.main()
note()
import torch
note()
import gradguess.estimate, gradguess.diagnose, gradguess.advise  # Python would put modules in the place of functions
import gradguess as gg
assert callable(gg.estimate) and callable(gg.diagnose) and callable(gg.advise)
from gradguess import *
assert set(gg.__all__) <= set(dir(gg))
note()
"""


def test_imports_of_a_fresh_interpreter():
    """Nothing slow after the help of all commands is nothing slow after any, and gradguess adds little to PyTorch."""
    cli = pytest.importorskip("gradguess_lab.cli")
    assert {each.name or each.callback.__name__ for each in cli.app.registered_commands} == set(COMMANDS)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    helped, plain, found = (set(json.loads(line[1:])) for line in done.stdout.splitlines() if line.startswith("@"))
    assert helped & SLOW == set()
    assert "gradguess.compile.compiler" in found  # the names are there
    assert found & LATER == plain & LATER


def test_the_package_shows_the_names_of_its_front():
    assert gg.__all__ is front.__all__
    assert all(getattr(gg, name) is getattr(front, name) for name in front.__all__)
    with pytest.raises(AttributeError, match="module 'gradguess' has no attribute 'gess'"):
        gg.gess  # noqa: B018
