"""A sample of mutants in a file: a machine without cosmic-ray and without git can run it."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from .find import Mutant, all_mutants, mutated, sample
from .settings import Settings

Edit = tuple[int, int, str]  # the characters from, to, and what takes their place


@dataclass(frozen=True)
class Listing:
    """Mutants and the edits that make them, of the sources of one commit."""

    commit: str
    seed: int
    drawn_from: int
    present: tuple[str, ...]  # the names of all mutants of the sources, also of those that were not drawn
    mutants: list[Mutant]
    edits: dict[str, Edit]  # by the name of the mutant
    digests: dict[str, str]  # of the files

    def mutated(self, text: str, mutant: Mutant) -> str:
        """The source with the mutant in it."""
        if _digest(text) != self.digests[mutant.file]:
            raise ValueError(f"{mutant.file} is not the file that the mutants were listed of: list them again")
        start, end, new = self.edits[mutant.name]
        return text[:start] + new + text[end:]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), ensure_ascii=False))

    @classmethod
    def read(cls, path: Path) -> "Listing":
        table = json.loads(path.read_text())
        edits = {name: tuple(edit) for name, edit in table.pop("edits").items()}
        mutants = [Mutant(**mutant) for mutant in table.pop("mutants")]
        return cls(**{**table, "present": tuple(table["present"])}, mutants=mutants, edits=edits)


def draw(settings: Settings, size: int, seed: int, only: list[str] | tuple[str, ...] = ()) -> Listing:
    """A sample of all mutants, or of those of some files and folders."""
    every = all_mutants(settings)
    inside = [m for m in every if not only or any(Path(m.file).is_relative_to(path) for path in only)]
    chosen = sample(inside, size, seed)
    texts = {file: (settings.root / file).read_text() for file in {m.file for m in chosen}}
    edits = {m.name: edit(texts[m.file], mutated(texts[m.file], m)) for m in chosen}
    digests = {file: _digest(text) for file, text in sorted(texts.items())}
    present = tuple(sorted(m.name for m in every))
    return Listing(settings.commit, seed, len(every), present, chosen, edits, digests)


def edit(before: str, after: str) -> Edit:
    """The smallest stretch that differs.

    >>> edit("a < b", "a <= b")
    (3, 3, '=')
    """
    shorter = min(len(before), len(after))
    start = next((i for i in range(shorter) if before[i] != after[i]), shorter)
    end = next((i for i in range(shorter - start) if before[-1 - i] != after[-1 - i]), shorter - start)
    return start, len(before) - end, after[start : len(after) - end]


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()[:10]
