"""Claims hold on the paper's own numbers, and break when the numbers do."""

from __future__ import annotations

import pytest

from gradguess_lab.paper_numbers import WIDTHS
from gradguess_lab.tables.checks import agree, ascending, at_least, gap_near
from gradguess_lab.tables.claims import CLAIMS, claims_table
from gradguess_lab.tables.runs import Run
from gradguess_lab.tables.sides import Side
from gradguess_lab.tables.speed import speed_claims_table
from gradguess_lab.tables.trends import flat, gap_grows, slower_than_width
from report.synthetic import diagnosed, paper_records, record, runs


def seeds(method: str, width: int, *accuracies: float, **config: object) -> list[Run]:
    return runs(*(record(method, width, seed, train_accuracy=a, **config) for seed, a in enumerate(accuracies)))


def around(mean: float, spread: float = 0.002, n: int = 6) -> list[float]:
    return [mean + spread * (-1) ** i for i in range(n)]


WT, WPERP = Side("wt", 128), Side("wperp", 128, k=10)


def test_the_paper_s_own_numbers_bear_out_its_claims():
    table = claims_table(runs(*paper_records(seeds=10)))
    verdicts = {r[0].text: r[3].verdict for r in table.rows}
    assert {text for text, verdict in verdicts.items() if verdict == "differs"} == {
        "W⊥-NS is as accurate as W⊥ (margin 0.02).",  # 0.594 is more than 0.581, with runs as close as these
    }
    assert sum(verdict == "holds" for verdict in verdicts.values()) >= 21


def test_nothing_run_nothing_claimed():
    """A claim that has a verdict without runs cannot change, and tells nothing of them."""
    assert {r[3].verdict for r in claims_table([]).rows} == {"not run"}


@pytest.mark.parametrize(
    ("wt", "wperp", "expected"),
    [
        ((0.30, 0.31, 0.32), (0.40, 0.41, 0.42), "holds"),
        ((0.40, 0.41, 0.42), (0.30, 0.31, 0.32), "differs"),
        ((0.30, 0.34, 0.38), (0.31, 0.35, 0.39), "unclear"),
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
    assert ascending(Side("activation", 128), WT, WPERP)(found).verdict == "differs"


@pytest.mark.parametrize(
    ("wperp", "spread", "expected"),
    [(0.3, 0.002, "holds"), (0.337, 0.002, "differs"), (0.31, 0.002, "differs"), (0.3, 0.05, "unclear")],
)
def test_agreement_is_no_rejection_and_equivalence(wperp: float, spread: float, expected: str):
    found = seeds("wt", 128, *around(0.3, spread)) + seeds("wperp", 128, *around(wperp, spread))
    outcome = agree(WPERP, WT, 0.02)(found)
    assert outcome.verdict == expected
    assert "difference" in outcome.ours
    assert "[" in outcome.ours  # the interval


def test_the_paper_s_gap_must_lie_in_our_prediction_interval():
    base = [0.30, 0.31, 0.32, 0.33]
    for gaps, expected in (([0.06, 0.07, 0.06, 0.07], "holds"), ([0.06, 0.062, 0.061, 0.06], "differs")):
        found = seeds("wt", 128, *base) + seeds("wperp", 128, *(a + g for a, g in zip(base, gaps, strict=True)))
        assert gap_near(WT, WPERP, 0.080, 0.0)(found).verdict == expected


def test_a_gap_is_paired_by_seed_where_seeds_are_the_same():
    wt = seeds("wt", 128, 0.2, 0.3, 0.4, 0.5)
    wperp = seeds("wperp", 128, 0.26, 0.361, 0.46, 0.561)
    assert gap_near(WT, WPERP, 0.087, 0.0)(wt + wperp).verdict == "differs"  # the seeds' spread cancels
    others = runs(*(record("wperp", 128, 9 + i, train_accuracy=a) for i, a in enumerate((0.26, 0.361, 0.46, 0.561))))
    assert gap_near(WT, WPERP, 0.087, 0.0)(wt + others).verdict == "holds"


def _gaps(**by_width: float) -> list[Run]:
    found = []
    for name, gap in by_width.items():
        width = int(name.removeprefix("w"))
        found += seeds("wt", width, *around(0.3, 0.001))
        found += seeds("wperp", width, *(a + 0.0005 * i for i, a in enumerate(around(0.3 + gap, 0.001))))
    return found


def test_growth_is_tested_at_every_step():
    check = gap_grows(lambda w: Side("wt", w), lambda w: Side("wperp", w, k=10), WIDTHS)
    assert check(_gaps(w64=0.0, w128=0.01, w256=0.05, w512=0.09)).verdict == "holds"
    shrinking = check(_gaps(w64=0.0, w128=0.01, w256=0.089, w512=0.062))
    assert shrinking.verdict == "differs"  # although the last gap exceeds the first
    assert "256 → 512 shrinks" in shrinking.ours
    standing = check(_gaps(w64=0.0, w128=0.01, w256=0.06, w512=0.06))
    assert standing.verdict == "unclear"
    assert "256 → 512 unclear" in standing.ours
    assert check(_gaps(w64=0.0)).verdict == "not run"
    one = seeds("wt", 64, 0.3) + seeds("wperp", 64, 0.3) + seeds("wt", 512, 0.3) + seeds("wperp", 512, 0.4)
    assert check(one).verdict == "one run, not judged"


def _variances(*values: float) -> list[Run]:
    return runs(
        *(
            diagnosed(record("wperp", width, seed), variance=value * (1 + 0.02 * (-1) ** seed))
            for width, value in zip(WIDTHS, values, strict=True)
            for seed in range(4)
        )
    )


def test_flat_is_an_exponent_within_the_margin():
    check = flat(lambda width: Side("wperp", width, "variance", 10, 1), WIDTHS, 0.25)
    assert check(_variances(1e-5, 1.05e-5, 0.98e-5, 1e-5)).verdict == "holds"
    assert check(_variances(1e-5, 2e-5, 4e-5, 8e-5)).verdict == "differs"
    assert check(_variances(8e-5, 4e-5, 2e-5, 1e-5)).verdict == "differs"
    assert check([]).verdict == "not run"


def test_k_must_grow_more_slowly_than_the_width():
    def overlaps(needed: dict[int, int]) -> list[Run]:
        found = []
        for width, k in needed.items():
            for seed in range(3):
                one = diagnosed(record("wperp", width, seed))
                for entry in one["diagnostics"]:
                    entry["sites"]["0"]["overlap"] = [min(1.0, 0.9 * i / k) for i in range(1, width + 1)]
                found.append(one)
        return runs(*found)

    check = slower_than_width(1, (128, 512), 0.9, 0.5)
    assert check(overlaps({128: 10, 512: 12})).verdict == "holds"
    assert check(overlaps({128: 10, 512: 40})).verdict == "differs"


def test_overlap_must_be_exceeded_in_every_layer():
    found = runs(*(diagnosed(record(seed=seed)) for seed in range(3)))
    assert at_least((1, 2, 3), 128, 10, 0.9)(found).verdict == "holds"
    assert at_least((1, 2, 3), 128, 10, 0.95)(found).verdict == "differs"
    assert at_least((3,), 128, 10, 0.999)(found).verdict == "holds"
    assert at_least((3,), 128, 10, 0.999)(found[:1]).verdict == "one run, not judged"


def _bench(method: str, step_ms: float, peak_mb: float, scaled_from: int | None) -> dict[str, object]:
    setting = {"width": 512, "depth": 3, "batch": 512, "k": 10, "dtype": "float32", "device": "cpu"}
    return {"method": method, **setting, "step_ms": step_ms, "peak_mb": peak_mb, "scaled_from": scaled_from}


def test_cost_is_compared_at_equal_batching_only():
    def table(*rows: dict[str, object]):
        return speed_claims_table([{"kind": "batching", "rows": list(rows)}])

    assert table(_bench("wperp-ns", 20, 800, None), _bench("wperp-svd", 900, 10, 2)) is None
    alike = table(_bench("wperp-ns", 20, 1, None), _bench("wperp-svd", 900, 10, 512))  # one step of all 512
    assert [r[-1].verdict for r in alike.rows] == ["holds", "holds"]
    both = table(_bench("wperp-ns", 20, 1, 2), _bench("wperp-svd", 900, 10, 2))
    assert [r[-1].verdict for r in both.rows] == ["holds", "holds"]
    worse = table(_bench("wperp-ns", 950, 9, 2), _bench("wperp-svd", 900, 10, 2))
    assert [r[-1].verdict for r in worse.rows] == ["differs", "differs"]


def test_a_claim_about_ten_directions_looks_at_the_tenth():
    (claim,) = (claim for claim in CLAIMS if claim.says.startswith("Layer 3 has rank 10"))

    def verdict(overlap: list[float]) -> str:
        found = [diagnosed(record(width=width, seed=s)) for width in (128, 512) for s in range(3)]
        for result in found:
            for entry in result["diagnostics"]:
                entry["sites"]["4"]["overlap"] = overlap
        return claim.check(runs(*found)).verdict

    assert verdict([0.5] * 9 + [1.0, 1.0]) == "holds"
    assert verdict([0.5] * 10 + [1.0]) != "holds"
