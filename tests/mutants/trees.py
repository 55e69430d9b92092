"""Copies of the repository for mutants: the working tree is never changed, whatever is killed."""

import os
import shutil
from pathlib import Path

from .settings import COPIED, Settings


def make_trees(settings: Settings, jobs: int) -> list[Path]:
    """One copy for each job, in a folder of this process. Those of processes that have ended are removed."""
    trees = settings.build / "trees"
    for old in trees.glob("*"):
        if not _runs(old.name):
            shutil.rmtree(old, ignore_errors=True)
    return [_copy(settings.root, trees / str(os.getpid()) / str(job)) for job in range(jobs)]


def remove_trees(settings: Settings) -> None:
    shutil.rmtree(settings.build / "trees" / str(os.getpid()), ignore_errors=True)


def put(tree: Path, file: str, text: str) -> None:
    """Write a module of a tree, and forget what Python compiled of it: two versions may share second and size."""
    path = tree / file
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _copy(root: Path, tree: Path) -> Path:
    tree.mkdir(parents=True)
    leave_out = shutil.ignore_patterns("__pycache__", ".hypothesis", "*.egg-info")
    for path in root.iterdir():
        if path.is_dir() and path.name in COPIED:
            shutil.copytree(path, tree / path.name, ignore=leave_out, symlinks=True)
        elif path.is_file() and path.name != ".git":  # of a worktree, `.git` is a file
            shutil.copy2(path, tree / path.name)
    return tree


def _runs(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True
