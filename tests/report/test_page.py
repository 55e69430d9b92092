"""The page and the files beside it."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gradguess.errors import GradguessError
from gradguess_lab.report import sections, write_report
from gradguess_lab.report.plot import draw, themed
from gradguess_lab.report.sections import SectionEntry
from gradguess_lab.tables.runs import Run
from gradguess_lab.tables.table import Curve, Figure, Table, text
from report.synthetic import diagnosed, record
from report.synthetic import write as write_results

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the training figures: drawing takes most of the time."""
    kept = tuple(entry for entry in sections.SECTIONS if entry.slug != "training")
    assert len(kept) == len(sections.SECTIONS) - 1
    monkeypatch.setattr(sections, "SECTIONS", kept)


def test_all_files_are_there(page: Path):
    folder = page.parent
    tables = {path.stem for path in (folder / "tables").glob("*.csv")}
    assert {"claims", "choice-of-k", "ranks", "bias-variance", "scaling", "newton-schulz", "preconditioning"} <= tables
    assert tables == {path.stem for path in (folder / "tables").glob("*.tex")}
    figures = {path.stem for path in (folder / "figures").glob("*.png")}
    assert {"scaling", "overlap-128", "overlap-512", "training-mnist1d-mlp-3-128-train-loss"} <= figures
    assert figures == {path.stem for path in (folder / "figures").glob("*.svg")}
    assert not [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def test_the_page_needs_no_network(page: Path):
    content = page.read_text()
    for tag, attributes in Tags(content).found:
        for name in ("src", "href", "xlink:href"):
            target = attributes.get(name) or "#"
            assert target.startswith(("#", "data:")), (tag, target)
    assert not re.search(r"url\((?!#)|@import", content)


def test_ids_are_unique_and_references_resolve(page: Path):
    tags = Tags(page.read_text()).found
    ids = [attributes["id"] for _, attributes in tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    used = {a["href"] for _, a in tags if (a.get("href") or "").startswith("#")}
    assert {name.removeprefix("#") for name in used} <= set(ids)


def test_the_page_says_what_the_rule_is_and_how_to_repeat_a_line(page: Path):
    content = page.read_text()
    assert "t s √(1 + 1/n) + r" in content
    assert "expected by chance alone" in content
    assert "gradguess train --data mnist1d --method wperp --width 128" in content
    assert "○</span> not run" in content
    assert "2.13.0" in content
    assert "0123456789" in content  # the commit


@pytest.mark.usefixtures("plain")
def test_names_from_results_are_inert(tmp_path: Path):
    results = [diagnosed(record(key=EVIL)), record("wt", key="b", data=EVIL), record(EVIL, key="c")]
    results[1]["environment"] = {"device": EVIL}
    page = write_report(write_results(tmp_path, results))
    content = page.read_text()
    tags = Tags(content).found
    assert [tag for tag, _ in tags].count("script") == 1
    assert not [tag for tag, attributes in tags if tag == "img" or "onerror" in attributes]
    assert "&lt;script&gt;alert(1)" in content


def test_names_in_figures_are_inert_too(tmp_path: Path):
    results = [record(EVIL + "--> $\\frac$ 模", key="a", data=EVIL)]
    page = write_report(write_results(tmp_path, results))
    tags = Tags(page.read_text()).found
    assert [tag for tag, _ in tags].count("script") == 1
    assert [tag for tag, _ in tags].count("figure") == 4
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]


@pytest.mark.usefixtures("plain")
def test_one_run_is_enough(tmp_path: Path):
    content = write_report(write_results(tmp_path, [record("wt", 64)])).read_text()
    assert "none of its lines is among these results" in content
    assert "1 run of 1 method, 1 seed, 30 seconds of training" in content


@pytest.mark.usefixtures("plain")
def test_runs_that_are_not_the_papers_have_a_page_without_it(tmp_path: Path):
    runs = [record(method, data="digits", model="cnn", epochs=4) for method in ("backprop", "wt")]
    page = write_report(write_results(tmp_path, runs))
    content = page.read_text()
    assert "<h1>Runs</h1>" in content
    assert {a["id"] for tag, a in Tags(content).found if tag == "section"} == {"how-to-read", "runs"}
    assert "not run" not in content
    assert "Wang" not in content
    assert {path.stem for path in (page.parent / "tables").glob("*.csv")} == {"environments", "runs"}


def test_a_diverged_run_is_shown(tmp_path: Path):
    result = record("wt", 128, train_accuracy=0.1, train_loss=math.nan)
    result["history"][5]["train_loss"] = math.inf
    content = write_report(write_results(tmp_path, [result])).read_text()
    assert ">nan\n" in content


@pytest.mark.usefixtures("plain")
def test_the_same_results_give_the_same_bytes(tmp_path: Path):
    results = write_results(tmp_path / "in", [diagnosed(record()), record("wt")])
    pages = [write_report(results, tmp_path / name) for name in ("a", "b")]
    files = [sorted(path.relative_to(page.parent) for path in page.parent.rglob("*.*")) for page in pages]
    assert files[0] == files[1]
    for name in files[0]:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@pytest.mark.usefixtures("plain")
def test_out_may_be_a_folder_or_the_page(tmp_path: Path):
    results = write_results(tmp_path / "in", [record("wt")])
    assert write_report(results) == results / "report" / "report.html"
    assert write_report(results, tmp_path / "x") == tmp_path / "x" / "report.html"
    assert write_report(results, tmp_path / "y" / "mine.html") == tmp_path / "y" / "mine.html"
    assert (tmp_path / "y" / "tables" / "scaling.csv").exists()


@pytest.mark.usefixtures("plain")
def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    results = write_results(tmp_path, [record("wt")])
    page = write_report(results)
    before = page.read_bytes()
    real = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if "report.html" in path.name:
            real(path, data[:100])
            raise OSError(28, "No space left on device")
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(GradguessError, match="disk is full"):
        write_report(results)
    assert page.read_bytes() == before
    assert not list(page.parent.glob(".*.tmp"))


def test_importing_the_report_loads_no_extra():
    code = "import sys, gradguess_lab.report; print({'matplotlib', 'jinja2'} & set(sys.modules) or 'none')"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() in {"none", "{'jinja2'}"}  # PyTorch itself may load jinja2


def test_further_sections_take_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def peak(runs: list[Run]) -> Table:
        return Table("memory", "Peak", ("Runs",), ((text(len(runs)),),))

    def empty(runs: list[Run]) -> list[Table]:
        return [Table("speed", "Speed", ("Runs",), ())]

    def absent(runs: list[Run]) -> None:
        return None

    entries = (
        SectionEntry("memory", "Memory", "How much.", tables=(peak,)),
        SectionEntry("speed", "Speed", tables=(empty, absent)),
        SectionEntry("nothing", "Nothing", tables=(absent,)),
    )
    monkeypatch.setattr(sections, "SECTIONS", entries)
    content = write_report(write_results(tmp_path, [record()])).read_text()
    assert 'id="memory"' in content
    assert 'id="speed"' not in content
    assert 'id="nothing"' not in content


def test_a_drawing_in_the_page_is_small_and_says_all_its_numbers():
    x = [float(i) for i in range(40)]
    curves = tuple(Curve(f"rate 0.00{i}25", x, [0.001 * i * v for v in x], "wt") for i in range(1, 10))
    drawing = draw(Figure("small", "Small", "x", "y", curves))
    shown = themed(drawing.inline, "f0")
    assert len(shown) < 30_000 < len(drawing.svg)
    for curve in curves:
        assert f">{curve.label}</text>" in shown  # digits of a name are not cut off
    assert not re.search(r'"[^">]*\d\.\d{3,}', shown)
    assert "font-family" not in shown  # the page's


def test_a_long_list_of_runs_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept = tuple(entry for entry in sections.SECTIONS if entry.slug == "runs")
    monkeypatch.setattr(sections, "SECTIONS", kept)
    many = [record("wt", seed=seed, key=f"wt-{seed}", train_accuracy=0.3 + 1e-6 * seed) for seed in range(200)]
    content = write_report(write_results(tmp_path, many)).read_text()
    assert content.count("<tr>") > 200
    assert content.count("gradguess train") == 1  # one command for all seeds
    assert "--seed SEED" in content
    assert len(content) < 1000 * len(many)
    assert "runs.tex" not in content  # nobody prints it; it lies beside the page
    assert (tmp_path / "report" / "tables" / "runs.tex").exists()


def test_a_figure_needs_a_safe_name():
    with pytest.raises(ValueError, match="lower-case"):
        Figure("a b", "t", "x", "y", ())
