"""Which sources are mutated: `[tool.mutants]` of pyproject.toml, the one place that names them."""

import hashlib
import os
import subprocess
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """The repository, what is mutated in it, and where everything is kept."""

    root: Path
    sources: tuple[str, ...]  # files and folders to mutate
    leave_out: tuple[str, ...] = ()  # files and folders inside of them that are not mutated
    apart: tuple[str, ...] = ()  # patterns: tests that run last and by themselves; the figure without them is given too
    always: tuple[str, ...] = ()  # patterns: tests that are chosen like those that bear the module's name
    preload: tuple[str, ...] = ()  # modules that the workers import once for all mutants
    environment: dict[str, str] = field(default_factory=dict)  # variables for the tests
    tests: int = 40  # the number of covering tests that each mutant meets
    mirrored: int = 20  # the number of further ones from the test file that bears the module's name
    seconds: float = 60.0  # the time that the chosen tests may take together, as measured without a mutant
    limit: float = 120.0  # the longest time limit of a mutant
    given_commit: str = ""  # where there is no git

    @classmethod
    def read(cls, root: Path) -> "Settings":
        table = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["mutants"]
        many = ("sources", "leave_out", "apart", "always", "preload")
        known = {*many, "environment", "tests", "mirrored", "seconds", "limit"}
        if unknown := sorted(set(table) - known):
            raise ValueError(f"[tool.mutants] knows {sorted(known)}, found {unknown}: remove them")
        lists = {key: tuple(table[key]) for key in many if key in table}
        return cls(root=root.resolve(), **{**table, **lists})

    @property
    def build(self) -> Path:
        return self.root / "build" / "mutants"

    @property
    def results(self) -> Path:
        return self.build / "results.jsonl"

    @property
    def unsteady(self) -> Path:
        """Tests that failed without a mutant too: they kill nothing."""
        return self.build / "unsteady.json"

    @property
    def page(self) -> Path:
        return self.build / "survivors.md"

    @property
    def map(self) -> Path:
        return self.build / "map.json.gz"

    @property
    def stored_map(self) -> Path:
        """A short map that is committed: used where none has been made."""
        return self.root / "tests" / "mutants" / "map.json.gz"

    @property
    def verdicts(self) -> Path:
        return self.root / "tests" / "mutants" / "verdicts.json"

    def files(self) -> list[str]:
        """The sources to mutate, relative to the root, in order. The most specific entry of the two lists decides."""
        wanted = {self.root / name: name in self.sources for name in (*self.sources, *self.leave_out)}
        for path in wanted:
            if not path.exists():
                raise FileNotFoundError(f"[tool.mutants] names {path}, which is not there: correct pyproject.toml")
        found = {file for path in wanted for file in ([path] if path.is_file() else path.rglob("*.py"))}
        kept = [file for file in found if next(wanted[p] for p in (file, *file.parents) if p in wanted)]
        return sorted(file.relative_to(self.root).as_posix() for file in kept)

    @cached_property
    def commit(self) -> str:
        """The last commit that changed the source or its tests, and a digest of what is not committed yet.

        The tool itself is no part of it: a new verdict leaves the results valid.
        """
        if self.given_commit:
            return self.given_commit
        scope = ["--", *(n for n in ("src", "tests", "conftest.py", "pyproject.toml") if (self.root / n).exists())]
        scope.append(":(exclude)tests/mutants")
        last = self._git("log", "-1", "--format=%h", *scope).decode().strip() or "none"
        changes = self._git("diff", "HEAD", *scope) if last != "none" else b""
        untracked = self._git("ls-files", "--others", "--exclude-standard", *scope).decode().split("\n")[:-1]
        changes += b"".join(name.encode() + (self.root / name).read_bytes() for name in untracked)
        return f"{last}+{hashlib.sha1(changes).hexdigest()[:8]}" if changes else last

    def repository(self) -> list[str]:
        """Every file of the working tree that git does not ignore; without git, all but what is made."""
        if not (self.root / ".git").exists():
            return [file.relative_to(self.root).as_posix() for file in _walk(self.root)]
        listed = self._git("ls-files", "-z", "--cached", "--others", "--exclude-standard").decode().split("\0")[:-1]
        return [name for name in dict.fromkeys(listed) if (self.root / name).exists()]

    def _git(self, *arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=self.root, capture_output=True, check=False).stdout


MADE = ("__pycache__", "build", "carry", "dist")


def _walk(folder: Path) -> list[Path]:
    found = []
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in MADE and not name.startswith("."))
        found += [Path(at) / name for name in sorted(files)]
    return found


def matches(test: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(test, pattern) for pattern in patterns)
