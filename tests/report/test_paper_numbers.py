"""The published numbers, checked against the paper by hand where a slip would be easy."""

from __future__ import annotations

from collections import Counter

import pytest

from gradguess_lab.paper_numbers import ENTRIES, SCALING


def value(table: str, method: str, width: int, quantity: str, **rest: object) -> float:
    found = [
        e
        for e in ENTRIES
        if (e.table, e.method, e.width, e.quantity) == (table, method, width, quantity)
        and all(getattr(e, name) == wanted for name, wanted in rest.items())
    ]
    assert len(found) == 1
    return found[0].value


def test_every_table_is_complete():
    assert Counter(entry.table for entry in ENTRIES) == {
        "W_perp": 5,
        "overlap": 6,
        "orthogonal_bias_var": 9,
        "tab:scaling_table": 20,
        "ns_table": 18,
        "preconditioning": 12,
    }


def test_numbers_of_each_table():
    assert value("W_perp", "wperp", 128, "train_accuracy", k="rank") == 0.311
    assert value("overlap", "wperp", 512, "rank", layer=2) == 387
    assert value("orthogonal_bias_var", "wperp", 128, "bias") == pytest.approx(2.86e-5)
    assert value("tab:scaling_table", "wperp", 256, "train_accuracy") == 0.4339256897
    assert value("ns_table", "wperp", 512, "seconds") == 40 * 3600
    assert value("ns_table", "wt", 512, "train_accuracy") == 0.486
    assert value("preconditioning", "wp", 256, "bias") == pytest.approx(1.35e-8)


def test_scaling_prints_as_in_the_paper():
    assert max(entry.rounding for entry in SCALING) <= 0.0005 + 1e-12
    row = [f"{entry.value:.3f}" for entry in SCALING if entry.width == 256]
    assert row == ["0.179", "0.309", "0.376", "0.434", "0.887"]
