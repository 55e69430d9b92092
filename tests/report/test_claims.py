"""Claims hold on the paper's own numbers, and break when the numbers do."""

from __future__ import annotations

import pytest

from gradguess_lab.paper_numbers import WIDTHS
from gradguess_lab.tables.bench import speed_claims_table
from gradguess_lab.tables.claims import (
    ascending,
    at_least,
    claims_table,
    flat,
    gap_grows,
    gap_near,
    outcome,
    slower_than_width,
)
from gradguess_lab.tables.runs import Run
from report.synthetic import diagnosed, paper_records, record, runs


def seeds(method: str, width: int, *accuracies: float, first: int = 0) -> list[Run]:
    return runs(*(record(method, width, seed, train_accuracy=a) for seed, a in enumerate(accuracies, first)))


def around(mean: float, spread: float = 0.002, n: int = 6) -> list[float]:
    return [mean + spread * (-1) ** i for i in range(n)]


WT, WPERP = "wt 128", "wperp 128 10"


def test_the_paper_s_own_numbers_bear_out_its_claims():
    verdicts = {row["The paper says"]: row["Verdict"] for row in claims_table(runs(*paper_records(seeds=10))).rows}
    assert {text for text, verdict in verdicts.items() if verdict == "differs"} == {
        "W⊥-NS is as accurate as W⊥ (margin 0.02).",  # 0.594 is more than 0.581, with runs as close as these
    }
    assert sum(verdict == "holds" for verdict in verdicts.values()) >= 21
    assert {row["Verdict"] for row in claims_table([]).rows} == {"not run"}


@pytest.mark.parametrize(
    ("wt", "wperp", "expected"),
    [
        ((0.30, 0.31, 0.32), (0.40, 0.41, 0.42), "holds"),
        ((0.40, 0.41, 0.42), (0.30, 0.31, 0.32), "differs"),
        ((0.30, 0.31, 0.32), (0.317, 0.327, 0.337), "unclear"),  # 2.08 standard errors: t(.95, 4) is 2.13
        ((0.30, 0.31, 0.32), (0.318, 0.328, 0.338), "holds"),
        ((0.30,), (0.40,), "one run, not judged"),
    ],
)
def test_ascending_is_a_one_sided_welch_test(wt: tuple[float, ...], wperp: tuple[float, ...], expected: str):
    assert ascending(WT, WPERP)(seeds("wt", 128, *wt) + seeds("wperp", 128, *wperp)).verdict == expected


def test_a_chain_is_as_strong_as_its_weakest_link():
    found = [*seeds("activation", 128, *around(0.2)), *seeds("wt", 128, *around(0.3))]
    found += seeds("wperp", 128, *around(0.25))
    assert ascending("activation 128", WT, WPERP)(found).verdict == "differs"


def test_the_paper_s_gap_must_lie_in_our_prediction_interval():
    base = [0.30, 0.31, 0.32, 0.33]
    for gaps, expected in (([0.06, 0.07, 0.06, 0.07], "holds"), ([0.06, 0.062, 0.061, 0.06], "differs")):
        found = seeds("wt", 128, *base) + seeds("wperp", 128, *(a + g for a, g in zip(base, gaps, strict=True)))
        assert gap_near(WT, WPERP, 0.080, 0.0)(found).verdict == expected


def test_a_gap_is_paired_by_seed_where_seeds_are_the_same():
    wt, ours = seeds("wt", 128, 0.2, 0.3, 0.4, 0.5), (0.26, 0.361, 0.46, 0.561)
    check = gap_near(WT, WPERP, 0.087, 0.0)
    assert check(wt + seeds("wperp", 128, *ours)).verdict == "differs"  # the seeds' spread cancels
    assert check(wt + seeds("wperp", 128, *ours, first=9)).verdict == "holds"


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ((0.0, 0.01, 0.05, 0.09), "holds"),
        ((0.0, 0.01, 0.089, 0.062), "differs"),  # although the last gap exceeds the first
        ((0.0, 0.01, 0.06, 0.06), "unclear"),
        ((0.0,), "not run"),
    ],
)
def test_growth_is_tested_at_every_step(gaps: tuple[float, ...], expected: str):
    found = []
    for width, gap in zip(WIDTHS, gaps, strict=False):
        found += seeds("wt", width, *around(0.3, 0.001))
        found += seeds("wperp", width, *(a + 0.0005 * i for i, a in enumerate(around(0.3 + gap, 0.001))))
    check = gap_grows("wt {}", "wperp {} 10")
    assert outcome(check, found).verdict == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1e-5, 1.05e-5, 0.98e-5, 1e-5), "holds"),
        ((1e-5, 2e-5, 4e-5, 8e-5), "differs"),
        ((8e-5, 4e-5, 2e-5, 1e-5), "differs"),
    ],
)
def test_flat_is_an_exponent_within_the_margin(values: tuple[float, ...], expected: str):
    found = runs(
        *(
            diagnosed(record("wperp", width, seed), variance=value * (1 + 0.02 * (-1) ** seed))
            for width, value in zip(WIDTHS, values, strict=True)
            for seed in range(4)
        )
    )
    assert flat("wperp {} 10 variance", 0.25)(found).verdict == expected


@pytest.mark.parametrize(("k", "expected"), [(12, "holds"), (40, "differs")])
def test_k_must_grow_more_slowly_than_the_width(k: int, expected: str):
    found = []
    for width, needed in {128: 10, 512: k}.items():
        for seed in range(3):
            found.append(diagnosed(record("wperp", width, seed)))
            for entry in found[-1]["diagnostics"]:
                entry["sites"]["0"]["overlap"] = [min(1.0, 0.9 * i / needed) for i in range(1, width + 1)]
    assert slower_than_width(1, 0.9, 0.5)(runs(*found)).verdict == expected


def test_overlap_with_ten_directions_must_be_exceeded_in_every_layer():
    found = runs(*(diagnosed(record(seed=seed)) for seed in range(3)))
    assert at_least((1, 2, 3), 128, 0.9)(found).verdict == "holds"
    assert at_least((1, 2, 3), 128, 0.95)(found).verdict == "differs"
    assert at_least((3,), 128, 0.999)(found).verdict == "holds"  # of rank ten: the ninth does not suffice
    assert at_least((3,), 128, 0.999, k=9)(found).verdict == "differs"
    assert at_least((3,), 128, 0.999)(found[:1]).verdict == "one run, not judged"


def _bench(method: str, step_ms: float, peak_mb: float, scaled_from: int | None) -> dict[str, object]:
    setting = {"width": 512, "depth": 3, "batch": 512, "k": 10, "dtype": "float32", "device": "cpu"}
    return {"method": method, **setting, "step_ms": step_ms, "peak_mb": peak_mb, "scaled_from": scaled_from}


def test_cost_is_compared_at_equal_batching_only():
    def verdicts(*rows: dict[str, object]) -> list[str]:
        return [row["Verdict"] for row in speed_claims_table([{"kind": "batching", "rows": list(rows)}]).rows]

    assert verdicts(_bench("wperp-ns", 20, 800, None), _bench("wperp-svd", 900, 10, 2)) == []
    alike = _bench("wperp-ns", 20, 1, None), _bench("wperp-svd", 900, 10, 512)  # one step of all 512
    assert verdicts(*alike) == ["holds", "holds"]
    assert verdicts(_bench("wperp-ns", 950, 9, 2), _bench("wperp-svd", 900, 10, 2)) == ["differs", "differs"]
