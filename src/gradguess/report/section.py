"""A section of the report: a title, a few words, tables and figures, all made from the runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradguess.experiments.tables import Figure, Run, Table

__all__ = ["Builder", "Section"]


@dataclass(frozen=True)
class Section:
    slug: str
    title: str
    intro: str = ""
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    keep_empty: bool = False  # the paper's sections stay, and say what has not been run

    @property
    def has_data(self) -> bool:
        return bool(self.figures) or any(table.ran for table in self.tables)


Builder = Callable[[Sequence[Run]], Section | None]
