"""One of the two processes of the case "processes": python worker.py RANK DIRECTORY WOBBLE."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import distributed

from golden import cases


def main(number: int, directory: Path, wobble: int) -> None:
    torch.set_num_threads(1)
    cases.WOBBLE = wobble
    distributed.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=number, world_size=2)
    with cases.fed_noise():
        found = cases.rank(number)
    np.savez(directory / f"{number}.npz", labels=np.array(list(found)), values=np.array(list(found.values())))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
