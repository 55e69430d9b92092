"""Install a wheel in an empty environment and train a first network: `python scripts/smoke_wheel.py dist/*.whl`.

Needs nothing but Python. Versions are those of `constraints.txt`; pip's cache is used. The environment is deleted.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
ROOM = 10e9  # bytes that PyTorch with its CUDA libraries may take, packed and unpacked

# Ten lines of a user. What follows them checks the result.
FIRST_TRAINING = """
import torch, gradguess as gg
torch.manual_seed(0)
x = torch.randn(256, 8); t = (x[:, 0] > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
forward = gg.ForwardGradient(model, gg.WPerp(k=2))
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(100):
    optimiser.zero_grad()
    loss = forward(torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    optimiser.step()
accuracy = float((model(x).argmax(1) == t).float().mean())
assert accuracy > 0.9, accuracy
print(f"gradguess {gg.__version__}, accuracy {accuracy:.3f}")
"""
FILES = """
from importlib.resources import files
assert files("gradguess").joinpath("py.typed").is_file()
"""


def main(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        free = shutil.disk_usage(folder).free
        if free < ROOM:
            sys.exit(
                f"{folder} has {free / 1e9:.0f} GB left; the test needs {ROOM / 1e9:.0f}. Set TMPDIR to another disk."
            )
        bin = Path(folder) / "env" / "bin"
        timed("an empty environment", lambda: venv.create(bin.parent, with_pip=True))
        timed("install the wheel", lambda: install(bin, str(wheel)))
        timed("first training", lambda: run(folder, bin / "python", "-c", FIRST_TRAINING))
        timed("files of the package", lambda: run(folder, bin / "python", "-c", FILES))
        timed("install the lab", lambda: install(bin, str(CONSTRAINTS.parent / "lab")))
        timed("gradguess --help", lambda: run(folder, bin / "gradguess", "--help", quiet=True))


def install(bin: Path, what: str) -> None:
    run(bin, bin / "python", "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, what)


def run(where: str | Path, *command: str | Path, quiet: bool = False) -> None:
    """Run a command outside of the repository, so that nothing is imported from there; end if it fails."""
    subprocess.run(command, cwd=where, check=True, stdout=subprocess.DEVNULL if quiet else None)


def timed(what: str, do: Callable[[], object]) -> None:
    start = time.perf_counter()
    do()
    print(f"{time.perf_counter() - start:6.1f} s  {what}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve())
