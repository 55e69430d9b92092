"""Copies of the repository for mutants: the working tree is never changed, whatever is killed."""

import os
import shutil
from pathlib import Path

from .settings import Settings


def make_trees(settings: Settings, jobs: int) -> list[Path]:
    """One copy for each job, in a folder of this process. Those of processes that have ended are removed."""
    trees = settings.build / "trees"
    for old in trees.glob("*"):
        if not _runs(old.name):
            shutil.rmtree(old, ignore_errors=True)
    return [_copy(settings, trees / str(os.getpid()) / str(job)) for job in range(jobs)]


def remove_trees(settings: Settings) -> None:
    shutil.rmtree(settings.build / "trees" / str(os.getpid()), ignore_errors=True)


def put(tree: Path, file: str, text: str) -> None:
    """Write a module of a tree, and forget what Python compiled of it: two versions may share second and size."""
    path = tree / file
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _copy(settings: Settings, tree: Path) -> Path:
    for name in settings.repository():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(settings.root / name, tree / name, follow_symlinks=False)
    return tree


def _runs(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True
