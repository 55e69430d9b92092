"""What is imported, and when: the help of the command needs no PyTorch, and `import gradguess` little beside it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import gradguess as gg
from gradguess import front
from gradguess.online.bases import BASES
from gradguess_lab import config, studies
from gradguess_lab.streams import config as streams

COMMANDS = ("train", "reproduce", "report", "diagnose", "stream", "bench", "compare", "advise")
SLOW = {"torch", "pandas", "matplotlib", "sklearn", "scipy", "sympy", "jinja2", "joblib", "safetensors", "transformers"}
# what PyTorch itself does not import, and compiling, plots and data need later
LATER = SLOW - {"torch"} | {"torch._dynamo", "torch._inductor", "torch._functorch.compile_utils", "triton", "lightning"}


def imported(program: str) -> list[set[str]]:
    """The modules that a fresh interpreter has wherever this program says `note()`."""
    program = "import json, sys\nnote = lambda: print('\\n@' + json.dumps(sorted(sys.modules)))\n" + program
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return [set(json.loads(line[1:])) for line in found.stdout.splitlines() if line.startswith("@")]


def test_help_imports_nothing_slow():
    """Every command's, in one interpreter: nothing slow after all of them is nothing slow after any."""
    cli = pytest.importorskip("gradguess_lab.cli")
    assert {each.name or each.callback.__name__ for each in cli.app.registered_commands} == set(COMMANDS)
    (found,) = imported(
        "import contextlib, gradguess_lab.cli\n"
        f"for arguments in {[[], *([name] for name in COMMANDS)]!r}:\n"
        "    sys.argv = ['gradguess', *arguments, '--help']\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        gradguess_lab.cli.main()\n"
        "note()"
    )
    assert found & SLOW == set()


def test_the_package_imports_little_beside_pytorch():
    plain, found = imported("import torch\nnote()\nimport gradguess\ngradguess.estimate\nnote()")
    assert "gradguess.methods.compiled" in found  # the names are there
    assert found & LATER == plain & LATER


def test_public_names_are_the_same_whatever_comes_first():
    """Python would put modules in the place of functions."""
    imported(
        "import gradguess.estimate, gradguess.diagnose, gradguess.advise\n"
        "from gradguess import *\n"
        "import gradguess as gg\n"
        "assert callable(gg.estimate) and callable(gg.diagnose) and callable(gg.advise)\n"
        "assert set(gg.__all__) <= set(dir(gg))"
    )


def test_the_package_shows_the_names_of_its_front():
    assert gg.__all__ is front.__all__
    assert all(getattr(gg, name) is getattr(front, name) for name in front.__all__)
    with pytest.raises(AttributeError, match="module 'gradguess' has no attribute 'gess'"):
        gg.gess  # noqa: B018


def test_names_that_help_lists_are_those_of_the_code():
    assert set(config.LEARN) == {*studies.RULES, "truth", "never"}
    assert list(streams.BASES) == list(BASES)
