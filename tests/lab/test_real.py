from __future__ import annotations

import dataclasses

from gradguess_lab.config import TrainConfig
from gradguess_lab.real import STUDIED, TASKS, real
from gradguess_lab.tables.real import real_table
from gradguess_lab.tables.runs import Run


def test_every_task_runs_every_method_on_the_same_grid():
    runs = real(device="cpu")
    assert len({run.key for run in runs}) == len(runs) == len(TASKS) * len(STUDIED) * 3 * 3
    assert all(TrainConfig.from_dict(run.as_dict()) == run for run in runs)


def run_of(config: TrainConfig, **metrics: float) -> Run:
    return Run(config.key, config.as_dict(), {"step_ms": 2.0 if config.method == "wperp" else 1.0, **metrics})


def test_the_table_shows_each_method_at_its_best_rate():
    task = dataclasses.replace(TASKS["cnn-mnist"], samples=500)
    accuracy = {("backprop", 3e-4): 0.90, ("backprop", 1e-3): 0.95, ("wperp", 3e-4): 0.80, ("wperp", 1e-3): 0.70}
    runs = [
        run_of(
            dataclasses.replace(task, method=method, lr=lr, seed=seed),
            train_accuracy=1.0,
            test_accuracy=value + 0.01 * seed,
        )
        for (method, lr), value in accuracy.items()
        for seed in (0, 1)
    ]
    runs.append(run_of(dataclasses.replace(task, method="wperp", lr=3e-3), train_accuracy=1.0, test_accuracy=0.99))
    table = real_table([*runs, run_of(TrainConfig(), train_accuracy=0.5, test_accuracy=0.4)])
    assert table is not None
    shown = [dict(zip(table.columns, (cell.text for cell in row), strict=True)) for row in table.rows]
    assert [(row["Method"], row["Learning rate"], row["Seeds"]) for row in shown] == [
        ("Backpropagation", "0.001", "2"),
        ("W⊥", "0.0003", "2"),  # a rate with one seed alone is not the best of anything
    ]
    assert shown[0]["Test"].startswith("0.955")
    assert shown[1]["Test against backprop"].endswith("0.150")


def test_bits_are_better_when_fewer():
    task = TASKS["charformer-shakespeare"]
    runs = [
        run_of(dataclasses.replace(task, method="backprop", lr=lr), train_bits=bits, test_bits=bits)
        for lr, bits in ((3e-4, 3.0), (1e-3, 2.5))
    ]
    table = real_table(runs)
    assert table is not None
    assert table.rows[0][4].value == 1e-3
