"""Claims hold on the paper's own numbers, and break when the numbers do."""

from __future__ import annotations

import pytest

from gradguess.experiments.tables.checks import Side, agree, ascending, at_least, every, gap_grows, gap_near
from gradguess.experiments.tables.claims import claims_table
from gradguess.experiments.tables.runs import Run
from report.synthetic import Record, diagnosed, paper_records, record


def runs(*records: Record) -> list[Run]:
    return [Run(**{name: value for name, value in r.items() if name != "schema"}) for r in records]


def seeds(method: str, width: int, *accuracies: float, **config: object) -> list[Run]:
    return runs(*(record(method, width, seed, train_accuracy=a, **config) for seed, a in enumerate(accuracies)))


WT, WPERP = Side("wt", 128), Side("wperp", 128, k=10)


def test_the_paper_s_own_numbers_bear_out_its_claims():
    table = claims_table(runs(*paper_records(noise=0.0005)))
    verdicts = {r[0].text: r[3].verdict for r in table.rows}
    without_data = {text for text, verdict in verdicts.items() if verdict == "not run"}
    assert {"by SVD" in text for text in without_data} == {True}  # times and memory are not published as runs
    assert "differs" not in verdicts.values()
    assert sum(verdict == "holds" for verdict in verdicts.values()) >= 20


def test_nothing_run_nothing_claimed():
    assert {r[3].verdict for r in claims_table([]).rows} == {"not run"}


@pytest.mark.parametrize(
    ("wt", "wperp", "expected"),
    [
        ((0.30, 0.31, 0.32), (0.40, 0.41, 0.42), "holds"),
        ((0.40, 0.41, 0.42), (0.30, 0.31, 0.32), "differs"),
        ((0.30, 0.34, 0.38), (0.31, 0.35, 0.39), "unclear"),
        ((0.30,), (0.32,), "holds"),
        ((0.30,), (0.305,), "unclear"),
    ],
)
def test_ascending_needs_more_than_the_noise(wt: tuple[float, ...], wperp: tuple[float, ...], expected: str):
    assert ascending(WT, WPERP)(seeds("wt", 128, *wt) + seeds("wperp", 128, *wperp)).verdict == expected


def test_a_chain_is_as_strong_as_its_weakest_link():
    found = seeds("activation", 128, 0.2) + seeds("wt", 128, 0.3) + seeds("wperp", 128, 0.25)
    assert ascending(Side("activation", 128), WT, WPERP)(found).verdict == "differs"


def test_what_is_missing_is_said():
    outcome = ascending(Side("activation", 128), WT, WPERP)(seeds("wt", 128, 0.3) + seeds("wperp", 128, 0.4))
    assert outcome.verdict == "holds"
    assert outcome.ours.endswith("(1 not run)")


def test_agree_allows_the_stated_distance():
    assert agree(WT, WPERP, 0.01)(seeds("wt", 128, 0.30) + seeds("wperp", 128, 0.309)).verdict == "holds"
    assert agree(WT, WPERP, 0.01)(seeds("wt", 128, 0.30) + seeds("wperp", 128, 0.311)).verdict == "differs"


def test_gap_near_is_two_sided():
    for accuracy, expected in ((0.38, "holds"), (0.34, "differs"), (0.43, "differs")):
        found = seeds("wt", 128, 0.30) + seeds("wperp", 128, accuracy)
        assert gap_near(WT, WPERP, 0.087)(found).verdict == expected


def test_gap_grows_compares_the_ends():
    def sides(method: str, k: int | None):
        return lambda width: Side(method, width, k=k)

    check = gap_grows(sides("wt", None), sides("wperp", 10), (64, 128, 512))
    base = seeds("wt", 64, 0.3) + seeds("wt", 512, 0.5)
    assert check(base + seeds("wperp", 64, 0.3) + seeds("wperp", 512, 0.58)).verdict == "holds"
    assert check(base + seeds("wperp", 64, 0.38) + seeds("wperp", 512, 0.5)).verdict == "differs"
    assert check(base + seeds("wperp", 64, 0.3)).verdict == "not run"


def test_overlap_must_be_reached_in_every_layer():
    found = runs(diagnosed(record()))
    assert at_least((1, 2, 3), 128, 10, 0.9)(found).verdict == "holds"
    assert at_least((1, 2, 3), 128, 10, 0.95)(found).verdict == "differs"
    assert at_least((3,), 128, 10, 0.999)(found).verdict == "holds"


def test_times_are_compared_on_one_device_only():
    slow, fast = Side("wperp", 128, "step_ms", 10, solver="svd"), Side("wperp-ns", 128, "step_ms", 10)
    check = ascending(fast, slow, same_device=True)
    ns = record("wperp-ns", step_ms=2.0)
    assert check(runs(ns, record(solver="svd", device="cuda", step_ms=9.0))).verdict == "not run"
    assert check(runs(ns, record(solver="svd", step_ms=9.0))).verdict == "holds"
    both = [
        ns,
        record("wperp-ns", device="cuda", key="c", step_ms=9.5),
        record(solver="svd", device="cuda", step_ms=9.0),
    ]
    assert check(runs(*both)).verdict == "differs"


def test_every_takes_the_weakest():
    found = seeds("wt", 128, 0.3) + seeds("wperp", 128, 0.4)
    assert every(ascending(WT, WPERP), ascending(WPERP, WT))(found).verdict == "differs"
