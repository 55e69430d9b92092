"""The curve in the terminal."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from gradguess_lab.terminal_plot import plot

pty = pytest.importorskip("pty")
LINE = [(x, float(10 - x)) for x in range(11)]


def area(lines: list[str]) -> list[str]:
    """What is drawn: without the numbers and the frame."""
    return [line[12:] for line in lines[:-2]]


def test_asterisks_are_where_a_loop_puts_them():
    """Each column has the row of its value, and what lies between it and the row before."""
    values = [3.0, 9.0, 0.0, 1.0, 9.0, 4.0, 4.0, 2.0, 0.0, 0.0]
    drawn = area(plot(list(enumerate(values)), "x", width=22, height=10, encoding="ascii"))
    for column, value in enumerate(values):
        row, before = 9 - int(value), 9 - int(values[max(column - 1, 0)])
        between = range(min(row, before) + 1, max(row, before))
        found = {i for i, line in enumerate(drawn) if line.ljust(10)[column] == "*"}
        assert found == {row, *between}


def test_braille_has_the_dots_of_a_finer_grid():
    """A braille sign is two by four dots: the asterisks of a plot of twice the width and four times the height."""
    rng = np.random.default_rng(0)
    points = list(enumerate(rng.random(50).tolist()))
    fine = area(plot(points, "x", width=12 + 40, height=12, encoding="ascii"))
    order = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (3, 1)]  # Unicode's numbering of the dots
    for row, line in enumerate(area(plot(points, "x", width=12 + 20, height=3))):
        for column, sign in enumerate(line.ljust(20)):
            bits = 0 if sign == " " else ord(sign) - 0x2800
            for bit, (dy, dx) in enumerate(order):
                dot = fine[4 * row + dy].ljust(40)[2 * column + dx]
                assert bool(bits >> bit & 1) == (dot == "*")


def test_many_points_are_averaged():
    points = [(x, float(x % 2)) for x in range(1000)]
    lines = plot(points, "x", width=22, height=4, encoding="ascii")
    assert lines[0].split()[0] == lines[3].split()[0] == "0.5"


def test_numbers_and_frame():
    lines = plot(LINE, "epoch", width=32, height=4)
    assert [line.partition("┤")[0].strip() for line in (lines[0], lines[3])] == ["10", "0"]
    assert lines[-1].split() == ["0", "epoch", "10"]
    assert {len(line) for line in lines[-2:]} == {32}
    assert all(len(line) <= 32 for line in lines)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "no such encoding"])
def test_what_cannot_be_written_is_plain(encoding: str):
    "\n".join(plot(LINE, "epoch", encoding=encoding)).encode("ascii")


def test_too_little_to_draw():
    assert plot([], "x") == plot([(1, 2.0)], "x") == plot(LINE, "x", width=20) == []
    assert plot([(1, 2.0), (2, float("nan")), (3, float("inf"))], "x") == []
    with_gap = plot([(1, 2.0), (2, float("nan")), (3, 1.0)], "x")
    assert with_gap[-1].split() == ["1", "x", "3"]


def test_train_draws_in_a_terminal():
    """Standard output is a terminal; the bar and its live curve go to standard error, which is a pipe here."""
    pytest.importorskip("typer")
    pytest.importorskip("sklearn")
    small = ["--data", "digits", "--width", "8", "--depth", "1", "--epochs", "3", "--batch", "2000"]
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "gradguess", "train", "--method", "backprop", *small]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "60"}
    subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, env=environment, check=True)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "loss over epochs" in shown
    assert "┤" in shown
    assert "test_accuracy" in shown


def test_the_live_curve_goes_with_the_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """The curve is drawn while the block runs and is gone afterwards."""
    terminal = pytest.importorskip("gradguess_lab.terminal")
    from rich.console import Console

    from gradguess_lab.config import TrainConfig

    monkeypatch.setattr(terminal, "notes", Console(stderr=True, force_terminal=True, width=80))
    rows: list[dict[str, float]] = []
    with terminal.epoch_bar(TrainConfig(epochs=3), True, rows) as show:
        for epoch in (1, 2, 3):
            rows.append({"epoch": epoch, "loss": 1 / epoch, "step_ms": 1.0})
            show(rows[-1])
        (bar,) = [cell.cell_contents for cell in show.__closure__ if isinstance(cell.cell_contents, terminal._Watched)]
        assert "loss over epochs" in "\n".join(map(str, bar.get_renderables()))
    assert "loss over epochs" not in "\n".join(map(str, bar.get_renderables()))
    capsys.readouterr()
