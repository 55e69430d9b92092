"""Every number that the paper publishes, as data.

The numbers are kept as strings, exactly as they stand in the paper's source, because the last printed digit
says how far a number was rounded: `Published("0.312").rounding` is half of 0.001.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

# What every run of the paper has in common; a run is held against the paper only if it agrees with all of it.
SETTING: dict[str, object] = {
    "data": "mnist1d",
    "model": "mlp",
    "depth": 3,
    "epochs": 300,
    "lr": 1e-4,
    "batch": 512,
    "tangents": 1,
    "isolate": False,
    "balance": False,
    "top": "guess",
    "activation": "relu",
    "bias": False,
    "weight_decay": 0.01,
    "schedule": "constant",
}

WIDTHS = (64, 128, 256, 512)

# The paper counts layers from one; a site carries the name of its module in the `Sequential`.
LAYER_SITES = {1: "0", 2: "2", 3: "4"}


@dataclass(frozen=True)
class Published:
    """One published number: where it stands, what was run, which quantity, and the digits as printed.

    >>> entry = Published("W_perp", "wperp", 128, "train_accuracy", "0.324", k=10)
    >>> entry.value, round(entry.rounding, 6)
    (0.324, 0.0005)
    >>> Published("ns_table", "wt", 512, "seconds", "26m").value
    1560.0
    """

    table: str  # the label in the paper's source
    method: str
    width: int
    quantity: str
    printed: str
    k: int | str | None = None
    layer: int | None = None

    @property
    def value(self) -> float:
        return float(self._number) * self._unit

    @property
    def rounding(self) -> float:
        """Half a unit of the last printed digit."""
        return 0.5 * 10.0 ** int(self._number.as_tuple().exponent) * self._unit

    @property
    def _number(self) -> Decimal:
        return Decimal(self.printed.rstrip("hm"))

    @property
    def _unit(self) -> float:
        return {"h": 3600.0, "m": 60.0}.get(self.printed[-1], 1.0)


# Of each table, by its label in the paper's source: the quantities of its columns, with their layers, and its rows:
# method, width and k, and then the numbers.
_TABLES: dict[str, tuple[tuple[str, ...], str]] = {
    # choice of k
    "W_perp": (
        ("train_accuracy",),
        "wt 128: 0.312; wperp 128 rank: 0.311; wperp 128 25: 0.323; wperp 128 10: 0.324; wperp 128 1: 0.275",
    ),
    # the ranks in the two legends of the figure (the curves themselves are not published as numbers)
    "overlap": (("rank 1", "rank 2", "rank 3"), "wperp 128 10: 64 97 10; wperp 512 10: 260 387 10"),
    # variance, bias and covariance norm; its caption names neither the width nor the layer
    "orthogonal_bias_var": (
        ("variance 1", "bias 1", "covariance_norm 1"),
        "wt 128: 1.50e-4 2.75e-4 0.084; wperp-bottom 128 10: 1.30e-5 2.83e-4 0.085; "
        "wperp 128 10: 1.03e-5 2.86e-5 0.085",
    ),
    # table and figure, with the digits of the data file behind both (1.0 there is printed as 1.000)
    "tab:scaling_table": (
        ("train_accuracy",),
        "weight 64: 0.121319115; activation 64: 0.201; wt 64: 0.268; wperp 64 10: 0.268; backprop 64: 0.536; "
        "weight 128: 0.1236854; activation 128: 0.275; wt 128: 0.312; wperp 128 10: 0.323; backprop 128: 0.709; "
        "weight 256: 0.17908654; activation 256: 0.30934495; wt 256: 0.3755601043; wperp 256 10: 0.4339256897; "
        "backprop 256: 0.887019217; "
        "weight 512: 0.17734; activation 512: 0.319; wt 512: 0.494; wperp 512 10: 0.581; backprop 512: 1.000",
    ),
    # Newton-Schulz; the times are those of a laptop
    "ns_table": (
        ("seconds", "train_accuracy", "test_accuracy"),
        "wperp-ns 512 10: 6h 0.594 0.477; wperp 512 10: 40h 0.581 0.498; wt 512: 26m 0.486 0.438; "
        "wperp-ns 128 10: 9m 0.326 0.291; wperp 128 10: 1h 0.324 0.283; wt 128: 5m 0.312 0.277",
    ),
    "preconditioning": (
        ("variance 1", "bias 1", "train_accuracy", "test_accuracy"),
        "wperp 256 10: 6.33e-6 3.63e-5 0.433 0.383; wp 256: 1.75e-4 1.35e-8 0.367 0.314; "
        "wt 256: 7.04e-5 1.68e-4 0.375 0.316",
    ),
}


def _read(table: str) -> Iterator[Published]:
    columns, rows = _TABLES[table]
    for row in rows.split("; "):
        where, _, numbers = row.partition(": ")
        method, width, k, *_ = (*where.split(), None)
        for column, printed in zip(columns, numbers.split(), strict=True):
            quantity, _, layer = column.partition(" ")
            size = int(k) if k and k.isdecimal() else k
            yield Published(table, method, int(width), quantity, printed, size, int(layer) if layer else None)


CHOICE_OF_K, RANKS, BIAS_VARIANCE, SCALING, NEWTON_SCHULZ, PRECONDITIONING = (tuple(_read(table)) for table in _TABLES)
ENTRIES = CHOICE_OF_K + RANKS + BIAS_VARIANCE + SCALING + NEWTON_SCHULZ + PRECONDITIONING

# Numbers that the paper prints more than once (Wᵀ at width 128 stands in three tables) are one comparison.
DISTINCT = tuple({(e.method, e.width, e.quantity, e.k, e.layer, e.value): e for e in reversed(ENTRIES)}.values())[::-1]
