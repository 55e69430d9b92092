"""The documentation: its code runs and prints what is shown, its links lead somewhere, and every public name is in it.

A block `text` right after a block `python` is what the latter prints: word by word, and its numbers to a tenth or to
one in the last digit, since they differ between processors. `report/test_agreement.py` checks the numbers in prose.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NEEDS = {"docs/tutorials/3-reproduce-the-paper.md": ["mnist1d", "joblib"]}
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\w)")
EXTRAS = ("accelerate", "lightning", "peft", "transformers")  # a block that needs one of them may be left out


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[str, str]]:
    """The code of each block, and what the page shows that it prints; nothing where the page shows nothing."""
    pattern = r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?"
    return re.findall(pattern, page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def assert_shown(shown: str, printed: str) -> None:
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split(), f"printed:\n{printed}"
    for ours, theirs in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        digits = len(theirs.partition("e")[0].partition(".")[2])
        unit = 10.0**-digits if "e" not in theirs else 0.0
        assert abs(float(ours) - float(theirs)) <= 0.1 * abs(float(theirs)) + 1.001 * unit, f"printed:\n{printed}"


@pytest.mark.filterwarnings("ignore::Warning:lightning.*")  # what Lightning says of itself
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name)
def test_every_block_of_code_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for package in NEEDS.get(name(page), []):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "__docs__"}
    missing, left_out = [package for package in EXTRAS if find_spec(package) is None], []
    with torch.random.fork_rng():
        for number, (code, shown) in enumerate(blocks(page)):
            try:
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    exec(compile(code, f"{name(page)}, block {number}", "exec", dont_inherit=True), scope)
            except ImportError:
                if not missing:
                    raise
                left_out.append(number)
                continue
            if shown or page.parent.name == "tutorials":  # there, whatever is printed is shown
                assert_shown(shown, printed.getvalue())
    if left_out:
        pytest.skip(f"blocks {left_out} were left out, for want of {missing}; the others ran")


# --- the reference -------------------------------------------------------------------------------------------

PUBLIC = ("gradguess", "gradguess.guesses", "gradguess.online", "gradguess.baselines")


def public_names() -> dict[str, Any]:
    """Where each public name is defined, without the modules among them."""
    found = [getattr(module, name) for module in map(import_module, PUBLIC) for name in module.__all__]
    return {f"{one.__module__}.{one.__name__}": one for one in found if not inspect.ismodule(one)}


def test_the_reference_has_every_public_name():
    """That what it lists exists is what `make docs` checks."""
    reference = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    assert public_names().keys() - set(re.findall(r"^::: ([\w.]+)$", reference, flags=re.MULTILINE)) == set()


def test_every_argument_is_explained():
    missing = []
    for path, one in public_names().items():
        if path != "gradguess.online.online.Later" and not (inspect.isclass(one) and issubclass(one, Exception)):
            names = [name for name in inspect.signature(one).parameters if name not in ("args", "kwargs")]
            text = inspect.getdoc(one) or ""
            missing += [(path, name) for name in names if not re.search(rf"(?m)^ +{name}: \S", text)]
    assert missing == []
