"""The tables of deep networks: what is grouped, in which order, and against what."""

from __future__ import annotations

from gradguess_lab.config import TrainConfig
from gradguess_lab.tables.deep import deep_tables
from gradguess_lab.tables.runs import Run


def made(test: float, best: float | None = None, data: str = "cifar10", **settings) -> Run:
    config = TrainConfig(data=data, model="resnet18" if data == "cifar10" else "charformer", **settings)
    name = "bits" if data == "shakespeare" else "accuracy"
    metrics = {f"train_{name}": 0.5, f"test_{name}": test}
    return Run(config.key, config.as_dict(), metrics, [{"epoch": 1, f"test_{name}": test if best is None else best}])


def texts(table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def test_each_network_and_length_has_a_table_and_backpropagation_stands_first():
    runs = [
        made(0.93, method="students", sites="4", seed=0),
        made(0.95, method="students", sites="4", seed=1),
        made(0.90, method="backprop", lr=0.1),
        made(0.92, method="backprop", lr=0.2),
        made(0.10, method="mezo"),
        made(0.50, method="backprop", epochs=2),
    ]
    long, short = deep_tables(runs)
    assert [row[0] for row in texts(long)] == ["Backpropagation", "Backpropagation", "Students", "MeZO"]
    assert [row[2] for row in texts(long)][:2] == ["0.2", "0.1"]
    assert [row[6] for row in texts(long)] == ["–", "−0.0200", "+0.0200", "−0.8200"]  # to the best rate
    assert texts(long)[2][1] == "4"
    assert texts(long)[2][7] == "2"
    assert texts(short) == [["Backpropagation", "–", "0.0001", "0.500", "0.500", "0.500", "–", "1"]]


def test_bits_are_better_when_less_and_the_best_epoch_is_the_least():
    shakespeare = {"data": "shakespeare"}
    runs = [made(2.5, 2.1, method="backprop", **shakespeare), made(2.4, method="students", **shakespeare)]
    runs.append(made(2.6, method="students-chained", **shakespeare))
    (table,) = deep_tables(runs)
    assert [row[0] for row in texts(table)] == ["Backpropagation", "Students", "Students, chained"]
    assert texts(table)[0][5] == "2.100"
    assert texts(table)[1][6] == "−0.1000"
