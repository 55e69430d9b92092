"""Hooks of MkDocs: what the site holds beside the pages of docs/, and what GitHub and Python-Markdown read differently.

Pages link to files of the repository, so that they work on GitHub too. Where a link leaves docs/, the file it names
becomes part of the site: Markdown and Python as a page, anything else as it is. `report/` is the report of the results.
"""

from __future__ import annotations

import html
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from command_line import commands

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
COMMANDS = "api/command-line.md"
# files of the repository that have a place in the navigation
PLACES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
EXAMPLES = {f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted((ROOT / "examples").glob("*.py"))}
REPORT = ROOT / "build" / "report" / "report.html"
MADE = [*PLACES.values(), *EXAMPLES.values()]

LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCED = re.compile(r"^```.*?^```$|`[^`\n]*`", flags=re.DOTALL | re.MULTILINE)
MARK = re.compile(r"^<!-- [\w-]+ -->$", flags=re.MULTILINE)  # of scripts/make_tables.py
ITEM = re.compile(r"^(?:[-*]|\d+\.) ")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', flags=re.DOTALL)
# what latex2mathml writes -> what browsers space as LaTeX does
MATHML = (
    ("<mi>&#x0007E;</mi>", "<mo>&#x0223C;</mo>"),  # is distributed as
    ("<mo>&#x022A4;</mo>", "<mi>&#x022A4;</mi>"),  # a transpose is no operator
    ("<mo>([A-Za-z]{2,})</mo>", r"<mi>\1</mi>"),  # nor is a name
    ("<mo>&#x02016;</mo>", '<mo stretchy="false">&#x02016;</mo>'),  # both bars of a norm are of one height
    ('<mover>(?=<mi>[^<]*</mi><mo stretchy="false">&#x0007E;)', '<mover accent="true">'),
)


def source_of(src_uri: str) -> Path:
    """The file of the repository that a page is made from."""
    made = {place: name for name, place in {**PLACES, **EXAMPLES}.items()}
    return ROOT / made[src_uri] if src_uri in made else DOCS / src_uri


def place_of(target: Path) -> str:
    """Where the site holds a file of the repository."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    name = target.relative_to(ROOT).as_posix()
    return {**PLACES, **EXAMPLES}.get(name, f"files/{name}")


def target_of(source: Path, link: str) -> Path | None:
    """The file of the repository that a link leads to, if that is a file."""
    target = (source.parent / link).resolve()
    return target if "://" not in link and target.is_file() and target.is_relative_to(ROOT) else None


def outside(source: Path, text: str) -> set[Path]:
    """The files outside docs/ that a text links to."""
    targets = {target_of(source, found[2]) for found in LINK.finditer(FENCED.sub("", text))}
    return {target for target in targets if target is not None and not target.is_relative_to(DOCS)}


def relinked(src_uri: str, text: str) -> str:
    """The text with links that hold inside the site."""
    source = source_of(src_uri)

    def new(found: re.Match[str]) -> str:
        target = target_of(source, found[2])
        if target is None or (target.is_relative_to(DOCS) and source.is_relative_to(DOCS)):
            return found[0]
        return found[1] + posixpath.relpath(place_of(target), posixpath.dirname(src_uri) or ".") + found[3]

    return LINK.sub(new, text)


def for_python_markdown(text: str) -> str:
    """Python-Markdown wants an empty line around a table and before a list, and four spaces before an inner list."""
    lines: list[str] = []
    fenced = False
    for line in MARK.sub("", text).split("\n"):
        fenced ^= line.startswith("```")
        before = lines[-1] if lines else ""
        if not fenced and ITEM.match(line) and before.strip() and not ITEM.match(before) and before[0] != " ":
            lines.append("")
        if line.startswith("|"):
            line = line.replace(" ± ", "\u00a0±\u00a0")  # a number and its spread stay on one line
        lines.append(line if fenced else re.sub(r"^ {2,3}(?=- )", "    ", line))
    return "\n".join(lines)


def example_page(path: Path) -> str:
    """An example as a page: its docstring, then its code."""
    code = path.read_text(encoding="utf-8")
    title = code.removeprefix('"""').split('"""')[0].split("\n")[0]
    return f"# {path.name}\n\n{title}\n\n```python\n{code}```\n"


def report() -> list[Path]:
    """The files of the report of `results/paper`, made again where they are older than the results or the lab."""
    made_of = [*(ROOT / "results").glob("*.gz"), *(ROOT / "lab").rglob("*.py")]
    if not REPORT.exists() or REPORT.stat().st_mtime < max(path.stat().st_mtime for path in made_of):
        from gradguess_lab.report.write import write_report

        write_report(ROOT / "results" / "paper", REPORT)
    return [path for path in REPORT.parent.rglob("*") if path.is_file()]


def on_config(config: Any) -> Any:
    from pymdownx.slugs import slugify

    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")  # the anchors that GitHub gives
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    def add(src_uri: str, **content: Any) -> None:
        files.append(File.generated(config, src_uri, **content))

    for name, place in PLACES.items():
        add(place, content=(ROOT / name).read_text(encoding="utf-8"))
    for name, place in EXAMPLES.items():
        add(place, content=example_page(ROOT / name))
    for path in report():
        add(f"report/{path.relative_to(REPORT.parent).as_posix()}", abs_src_path=str(path))
    pages = [(source_of(page.src_uri), page.content_string) for page in files.documentation_pages()]
    for target in sorted(set().union(*(outside(source, text) for source, text in pages))):
        if files.get_file_from_path(place_of(target)) is None:
            add(place_of(target), abs_src_path=str(target))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    src_uri = page.file.src_uri
    return for_python_markdown(relinked(src_uri, markdown)) + ("\n" + commands() if src_uri == COMMANDS else "")


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Formulas as MathML, which browsers draw by themselves."""
    from latex2mathml.converter import convert

    def drawn(found: re.Match[str]) -> str:
        made: str = convert(html.unescape(found[3]), display="block" if found[2] == "[" else "inline")
        for wrong, right in MATHML:
            made = re.sub(wrong, right, made)
        return made

    return FORMULA.sub(drawn, content)
