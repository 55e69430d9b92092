"""Every number that the paper publishes, as data.

The numbers are kept as strings, exactly as they stand in the paper's source, because the last printed digit
says how far a number was rounded: `Published("0.312").rounding` is half of 0.001.
"""

from __future__ import annotations

from dataclasses import dataclass

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

_SECONDS = {"h": 3600.0, "m": 60.0}


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
        return float(self._digits) * self._unit

    @property
    def rounding(self) -> float:
        """Half a unit of the last printed digit."""
        mantissa, _, exponent = self._digits.partition("e")
        decimals = len(mantissa.partition(".")[2])
        return 0.5 * 10.0 ** (int(exponent or 0) - decimals) * self._unit

    @property
    def _digits(self) -> str:
        return self.printed.rstrip("hm")

    @property
    def _unit(self) -> float:
        return _SECONDS.get(self.printed[-1], 1.0)


def _k(method: str) -> int | None:
    return 10 if method in {"wperp", "wperp-bottom", "wperp-ns"} else None


# Table "choice of k": training accuracy at width 128.
CHOICE_OF_K = (
    Published("W_perp", "wt", 128, "train_accuracy", "0.312"),
    Published("W_perp", "wperp", 128, "train_accuracy", "0.311", k="rank"),
    Published("W_perp", "wperp", 128, "train_accuracy", "0.323", k=25),
    Published("W_perp", "wperp", 128, "train_accuracy", "0.324", k=10),
    Published("W_perp", "wperp", 128, "train_accuracy", "0.275", k=1),
)

# Figure "overlap": the ranks in its two legends (the curves themselves are not published as numbers).
RANKS = tuple(
    Published("overlap", "wperp", width, "rank", printed, k=10, layer=layer)
    for width, ranks in {128: ("64", "97", "10"), 512: ("260", "387", "10")}.items()
    for layer, printed in enumerate(ranks, start=1)
)

# Table "variance, bias and covariance norm"; its caption names neither the width nor the layer.
BIAS_VARIANCE = tuple(
    Published("orthogonal_bias_var", method, 128, quantity, printed, k=_k(method), layer=1)
    for method, numbers in {
        "wt": ("1.50e-4", "2.75e-4", "0.084"),
        "wperp-bottom": ("1.30e-5", "2.83e-4", "0.085"),
        "wperp": ("1.03e-5", "2.86e-5", "0.085"),
    }.items()
    for quantity, printed in zip(("variance", "bias", "covariance_norm"), numbers, strict=True)
)

_SCALING_METHODS = ("weight", "activation", "wt", "wperp", "backprop")
_SCALING_ROWS = {
    64: ("0.121319115", "0.201", "0.268", "0.268", "0.536"),
    128: ("0.1236854", "0.275", "0.312", "0.323", "0.709"),
    256: ("0.17908654", "0.30934495", "0.3755601043", "0.4339256897", "0.887019217"),
    512: ("0.17734", "0.319", "0.494", "0.581", "1.000"),
}

# Table and figure "scaling": training accuracy, with the digits of the data file behind both (1.0 there is
# printed as 1.000).
SCALING = tuple(
    Published("tab:scaling_table", method, width, "train_accuracy", printed, k=_k(method))
    for width, row in _SCALING_ROWS.items()
    for method, printed in zip(_SCALING_METHODS, row, strict=True)
)

# Table "Newton-Schulz": training time, training and test accuracy. The times are those of a laptop.
NEWTON_SCHULZ = tuple(
    Published("ns_table", method, width, quantity, printed, k=_k(method))
    for method, width, numbers in (
        ("wperp-ns", 512, ("6h", "0.594", "0.477")),
        ("wperp", 512, ("40h", "0.581", "0.498")),
        ("wt", 512, ("26m", "0.486", "0.438")),
        ("wperp-ns", 128, ("9m", "0.326", "0.291")),
        ("wperp", 128, ("1h", "0.324", "0.283")),
        ("wt", 128, ("5m", "0.312", "0.277")),
    )
    for quantity, printed in zip(("seconds", "train_accuracy", "test_accuracy"), numbers, strict=True)
)

# Table "preconditioning": width 256, bias and variance at layer 1.
PRECONDITIONING = tuple(
    Published(
        "preconditioning", method, 256, quantity, printed, k=_k(method),
        layer=1 if quantity in {"variance", "bias"} else None,
    )
    for method, numbers in {
        "wperp": ("6.33e-6", "3.63e-5", "0.433", "0.383"),
        "wp": ("1.75e-4", "1.35e-8", "0.367", "0.314"),
        "wt": ("7.04e-5", "1.68e-4", "0.375", "0.316"),
    }.items()
    for quantity, printed in zip(
        ("variance", "bias", "train_accuracy", "test_accuracy"), numbers, strict=True
    )
)  # fmt: skip

ENTRIES = CHOICE_OF_K + RANKS + BIAS_VARIANCE + SCALING + NEWTON_SCHULZ + PRECONDITIONING

# Numbers that the paper prints more than once (Wᵀ at width 128 stands in three tables) are one comparison.
DISTINCT = tuple({(e.method, e.width, e.quantity, e.k, e.layer, e.value): e for e in reversed(ENTRIES)}.values())[::-1]
