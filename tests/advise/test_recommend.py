"""The recommendation, from rows that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

import gradguess as gg
from gradguess.advise import Row
from gradguess.advise.advice import BACKPROP, CHECKPOINTED, SHALLOW, candidates_for, recommend

BACK = Row(BACKPROP, "loss.backward()", None, 1.0, 0.7, 1.0, 100.0, 1.0, 1.0)
CHECK = Row(CHECKPOINTED, "checkpoints", None, 1.4, 1.0, 0.4, 40.0, 1.0, 1.0)
STUDENTS = Row("Students", "students", None, 1.5, 1.1, 0.2, 20.0, 0.3, 0.1)
MEZO = Row("MeZO", "mezo", None, 0.8, 0.6, 0.1, 10.0, 0.01, 0.0)
ROWS = [BACK, CHECK, STUDENTS, MEZO]


def failed(row: Row) -> Row:
    return Row(row.method, row.code, "out of memory")


@pytest.mark.parametrize(
    ("limit", "row", "words"),
    [
        (None, BACK, "Use Backpropagation, the first method that works here: its gradient is exact."),
        (100.0, BACK, "that works here in 100 MB: its gradient is exact"),
        (99.0, CHECK, "Use Backpropagation, checkpoints"),
        (39.0, STUDENTS, "approximation (cosine 0.30): compare its accuracy with that of backpropagation"),
        (9.0, None, "Nothing that was measured fits into 9 MB; MeZO needs least, 10 MB"),
    ],
)
def test_the_first_that_fits_is_chosen(limit: float | None, row: Row | None, words: str):
    chosen, why = recommend(ROWS, limit)
    assert chosen is row
    assert words in why


def test_where_memory_is_not_counted_nothing_is_said_to_fit():
    unknown = [replace(row, memory=None, memory_mb=None) for row in ROWS]
    assert recommend(unknown)[0] is unknown[0]
    chosen, why = recommend(unknown, 1e6)
    assert chosen is None
    assert "not counted" in why
    assert recommend([unknown[0], CHECK], 50.0)[0] is CHECK


# --- the candidates ------------------------------------------------------------------------------------------


def deep(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))


def test_the_code_of_a_candidate_makes_its_method():
    for candidate in candidates_for(deep(3)):
        if candidate.method is not None:
            assert eval(candidate.code, {"gg": gg}) == candidate.method


def test_students_come_first_on_deep_models_alone():
    shallow, long = ([c.name for c in candidates_for(deep(n))] for n in (SHALLOW, SHALLOW + 1))
    assert sorted(shallow) == sorted(long)
    assert shallow[:2] == long[:2] == [BACKPROP, CHECKPOINTED]
    assert long[2] == "Students"
    assert shallow[2] == "Feedback, chained, rare lessons, in pieces"
