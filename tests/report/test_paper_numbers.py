"""The published numbers, checked against the paper by hand where a slip would be easy."""

from __future__ import annotations

from collections import Counter

import pytest

from gradguess_lab.paper_numbers import ENTRIES, SCALING


def value(**wanted: object) -> float:
    (found,) = [e for e in ENTRIES if all(getattr(e, name) == value for name, value in wanted.items())]
    return found.value


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
    assert value(table="W_perp", method="wperp", width=128, quantity="train_accuracy", k="rank") == 0.311
    assert value(table="overlap", method="wperp", width=512, quantity="rank", layer=2) == 387
    assert value(table="orthogonal_bias_var", method="wperp", width=128, quantity="bias") == pytest.approx(2.86e-5)
    assert value(table="tab:scaling_table", method="wperp", width=256, quantity="train_accuracy") == 0.4339256897
    assert value(table="ns_table", method="wperp", width=512, quantity="seconds") == 40 * 3600
    assert value(table="ns_table", method="wt", width=512, quantity="train_accuracy") == 0.486
    assert value(table="preconditioning", method="wp", width=256, quantity="bias") == pytest.approx(1.35e-8)


def test_scaling_prints_as_in_the_paper():
    assert max(entry.rounding for entry in SCALING) <= 0.0005 + 1e-12
    row = [f"{entry.value:.3f}" for entry in SCALING if entry.width == 256]
    assert row == ["0.179", "0.309", "0.376", "0.434", "0.887"]
