"""The library computes what it computed when the record was made (record.py): in float64, on a CPU.

To 1e-10; a few cases, which rounding moves further, to what the record says of them.
"""

from __future__ import annotations

import pytest

from golden.cases import compute
from golden.compare import golden, worst


@pytest.mark.parametrize("name", golden())
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_golden(name: str) -> None:
    (expected, tolerance), found = golden()[name], compute(name)
    difference, label = worst(expected, found)
    if difference > tolerance:
        values = f": recorded {expected[label]!r}, found {found[label]!r}" if label in expected else ""
        pytest.fail(f"{name}, {label}{values}, a relative difference of {difference:.1e}", pytrace=False)
