"""Fewer combinations of parameters than their product, the same in every run."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairwise(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Combinations in which any two values of two factors meet; of two factors these are all."""
    sizes = [list(factor) for factor in factors]
    places = list(product(*(range(len(factor)) for factor in sizes)))
    pairs = [{((i, at[i]), (j, at[j])) for i, j in combinations(range(len(at)), 2)} for at in places]
    left, chosen = set().union(*pairs), []
    while left:
        best = max(range(len(places)), key=lambda index: len(pairs[index] & left))
        chosen.append(places[best])
        left -= pairs[best]
    return [tuple(factor[i] for factor, i in zip(sizes, at, strict=True)) for at in chosen]


def each(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Combinations in which every value of every factor comes up: the shorter factors go round."""
    lists = [list(factor) for factor in factors]
    return [tuple(factor[i % len(factor)] for factor in lists) for i in range(max(map(len, lists)))]
