"""The controls and the numbers of the explorable page, as a user sets and reads them."""

from __future__ import annotations

from typing import Any


def cells(tab: Any, row: str, table: str = "#numbers") -> list[str]:
    return tab.locator(f"{table} tr", has=tab.locator("th", has_text=row)).first.locator("td").all_inner_texts()


def value(tab: Any, row: str) -> float:
    """The exact number of a row."""
    return float(cells(tab, row)[0].split()[0])


def choose(tab: Any, **settings: Any) -> None:
    """Set controls as a user would see them set."""
    for name, wanted in settings.items():
        if name in ("method", "layer"):
            tab.check(f"input[name={name}][value='{wanted}']")
        elif name == "others":
            tab.set_checked("#others", wanted)
        else:
            tab.fill(f"#{name.replace('_', '-')}", str(wanted))


def losses(tab: Any) -> dict[str, list[float]]:
    return tab.evaluate("window.gradguess.race.histories")


def wait_for_steps(tab: Any, steps: int) -> None:
    tab.wait_for_function(f"window.gradguess.race.steps > {steps}", timeout=60_000)
