"""The table by package, and the page of survivors."""

from collections import Counter, defaultdict

from .find import Mutant
from .record import Result
from .settings import Settings
from .verdicts import KINDS, Verdict, blank

COLUMNS = ("killed", "survived", "timed out", "equivalent", "incompetent")

Judged = tuple[Mutant, Result, Verdict | None]


def standing(result: Result, verdict: Verdict | None) -> str:
    """The column of a mutant: its outcome, as the verdict on it explains it."""
    if verdict and verdict.verdict == "loops" and result.outcome == "timed out":
        return "killed"
    if verdict and verdict.verdict == "equivalent" and result.outcome in ("survived", "timed out"):
        return "equivalent"
    return result.outcome


def table(judged: list[Judged], settings: Settings) -> list[str]:
    """Lines of text: a row for each package, then `killed N of M`, where M leaves out equivalent and incompetent."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant, result, verdict in judged:
        for row in (mutant.package(settings.sources), "all"):
            rows[row][standing(result, verdict)] += 1
    names = [*sorted(name for name in rows if name != "all"), *(["all"] if rows else [])]
    width = max(map(len, ["package", *names]))
    lines = ["  ".join([f"{'package':{width}}", *COLUMNS])]
    lines += ["  ".join([f"{name:{width}}", *(f"{rows[name][c]:>{len(c)}}" for c in COLUMNS)]) for name in names]
    killed = rows["all"]["killed"]
    of = killed + rows["all"]["survived"] + rows["all"]["timed out"]
    if settings.apart:
        late = sum(result.apart and standing(result, verdict) == "killed" for _, result, verdict in judged)
        lines.append(f"without the tests apart: killed {killed - late} of {of}")
    return [*lines, f"killed {killed} of {of}"]


def survivors(judged: list[Judged], stale: list[Verdict], settings: Settings) -> str:
    """The page: mutants without a verdict first, with an entry to copy; then the gaps; then the equivalent ones."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for entry in judged:
        _, result, verdict = entry
        if result.outcome in ("survived", "timed out"):
            groups[verdict.verdict if verdict else "no verdict"].append(entry)
        elif verdict and verdict.verdict != "gap":
            groups["wrong verdict"].append(entry)
    said = {
        "no verdict": "copy the entry into tests/mutants/verdicts.json and fill it in",
        "wrong verdict": "a test kills them: remove the entry from tests/mutants/verdicts.json",
        **KINDS,
    }
    lines = ["# Survivors", "", f"Source {settings.commit}.", ""]
    for group in (g for g in said if groups[g]):
        lines += [f"## {group.capitalize()}: {said[group]}", ""]
        for entry in sorted(groups[group], key=lambda e: (e[0].file, e[0].number)):
            lines += _entry(*entry)
    if stale:
        lines += ["## Verdicts on lines that are no longer there", ""]
        lines += [f"- {v.file}, {v.function or 'module'}: `{v.line}` ({v.operator})" for v in stale]
    return "\n".join(lines).rstrip() + "\n"


def _entry(mutant: Mutant, result: Result, verdict: Verdict | None) -> list[str]:
    met = f"{result.tests} of the {result.covering} tests that run it" if result.covering else "no test runs it"
    lines = [f"### {mutant.file}:{mutant.number} {mutant.function}", ""]
    lines += ["```diff", f"- {result.before}", f"+ {result.after}", "```", ""]
    lines += [f"{mutant.operator}; {result.outcome}, {met}." + (f" {verdict.why}" if verdict else ""), ""]
    return lines if verdict else [*lines, "```json", blank(mutant), "```", ""]
