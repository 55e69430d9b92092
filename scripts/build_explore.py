"""Put the explorable page together: `docs/explore/*` -> `docs/explore/explore.html`, one file that needs nothing else.

Run `python scripts/build_explore.py` after a change; a test compares the page with its parts.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "explore"
SCRIPTS = ("linalg", "network", "guesses", "moments", "race", "draw", "page", "race_page")


def built() -> str:
    """The whole page."""
    script = "\n".join(_read(f"{name}.js") for name in SCRIPTS)
    page = _read("page.html").replace("/* style */\n", _read("style.css"))
    return page.replace("/* script */\n", f'"use strict";\n(() => {{\n{script}}})();\n')


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    (FOLDER / "explore.html").write_text(built(), encoding="utf-8", newline="\n")
