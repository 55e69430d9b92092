"""A plugin of pytest for both runs: it times tests for the map, and runs chosen tests in order against a mutant.

It reads its options from the environment, so that workers of pytest-xdist see the same:

- `MUTANTS_TIMES`: a file for the seconds of each test that passed;
- `MUTANTS_CHILDREN`: a configuration of coverage.py for the processes that tests start;
- `MUTANTS_CHOSEN`: a file with the tests to run, in order;
- `MUTANTS_KILLER`: a file for the tests that fail;
- `MUTANTS_ALARM`: the seconds after which the process ends, even if nobody watches it any more.
"""

import json
import os
import signal
from pathlib import Path

import pytest

_seconds: dict[str, float] = {}
_failed: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    if alarm := os.environ.get("MUTANTS_ALARM"):
        signal.alarm(int(alarm))
    children = os.environ.get("MUTANTS_CHILDREN")
    distributes = getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput")
    if children and not distributes:  # this process runs tests: what they start measures itself
        os.environ["COVERAGE_PROCESS_START"] = children


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if chosen := os.environ.get("MUTANTS_CHOSEN"):
        order = {name: i for i, name in enumerate(json.loads(Path(chosen).read_text()))}
        left_out = [item for item in items if item.nodeid not in order]
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if report.failed or report.skipped:
        _failed.append(report.nodeid)
    if report.failed and (killer := os.environ.get("MUTANTS_KILLER")):
        with Path(killer).open("a") as file:
            file.write(report.nodeid + "\n")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (times := os.environ.get("MUTANTS_TIMES")) and not hasattr(session.config, "workerinput"):
        passed = {name: round(s, 4) for name, s in _seconds.items() if name not in _failed}
        Path(times).write_text(json.dumps(passed))
