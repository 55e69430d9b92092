"""What the paper says about the cost of W⊥-NS against the SVD, from the benchmarks: equal devices, equal batching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradguess_lab.tables.compare import DIFFERS, HOLDS, NOT_RUN
from gradguess_lab.tables.table import Cell, Table, number, text

Record = Mapping[str, Any]
_EQUAL = ("width", "depth", "batch", "k", "dtype", "device")
_TENTH = (0.05, 0.2)  # what counts as about a tenth, as the claim says


def speed_claims_table(records: Sequence[Record]) -> Table | None:
    """Each pair of rows that differ in the method alone; None without benchmarks of both methods."""
    rows = []
    for ns, svd in _pairs(records):
        where = f"width {ns['width']}, {_together(ns)} samples at a time, {str(ns['device']).partition(':')[0]}"
        rows.append(_row(f"A step of W⊥-NS is faster than one of W⊥ by SVD ({where}).", ns, svd, "step_ms", "ms", None))
        if ns["width"] == 512 and ns.get("peak_mb") and svd.get("peak_mb"):
            claim = f"W⊥-NS needs about a tenth of the memory, between 0.05 and 0.2 ({where})."
            rows.append(_row(claim, ns, svd, "peak_mb", "MB", _TENTH))
    if not rows:
        return None
    return Table(
        "claims-cost",
        "Claims about cost",
        ("The paper says", "W⊥-NS", "W⊥ by SVD", "Ratio", "Verdict"),
        tuple(rows),
        "From one benchmark on one device, with as many samples at a time in both: medians, without a test.",
    )


def _pairs(records: Sequence[Record]) -> list[tuple[Record, Record]]:
    measured = [row for record in records if record["kind"] in ("time", "batching") for row in record["rows"]]
    found = {(row["method"], *(row.get(name) for name in _EQUAL), _together(row)): row for row in measured}
    pairs = ((row, found.get(("wperp-svd", *key[1:]))) for key, row in found.items() if key[0] == "wperp-ns")
    return [(ns, svd) for ns, svd in pairs if svd is not None]


def _together(row: Record) -> int:
    """Samples that are computed at a time."""
    return int(row["scaled_from"] or row["batch"])


def _row(
    claim: str, ns: Record, svd: Record, quantity: str, unit: str, between: tuple[float, float] | None
) -> tuple[Cell, ...]:
    ratio = ns[quantity] / svd[quantity] if svd[quantity] else None
    low, high = between or (0.0, 1.0)
    verdict = NOT_RUN if ratio is None else HOLDS if low < ratio < high else DIFFERS
    sides = (Cell(f"{row[quantity]:,.{1 if row[quantity] < 100 else 0}f} {unit}", row[quantity]) for row in (ns, svd))
    return text(claim), *sides, number(ratio, ".2f"), text(verdict, verdict)
