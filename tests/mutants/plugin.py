"""A plugin of pytest for both runs: it times tests for the map, and runs chosen tests in order against a mutant.

It reads its options from the environment, so that workers of pytest-xdist see the same:

- `MUTANTS_TIMES`: a file for the seconds of each test that passed;
- `MUTANTS_CHILDREN`: a configuration of coverage.py for the processes that tests start;
- `MUTANTS_CHOSEN`: a file with the tests to run, in order;
- `MUTANTS_KILLER`: a file for the tests that fail;
- `MUTANTS_LAST`: a file for the test that was started last;
- `MUTANTS_EACH`: the seconds that a test may take: it fails after them;
- `MUTANTS_UNTIL`: the time (of the clock) after which tests are skipped.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_seconds: dict[str, float] = {}
_failed: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
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
        for item in items:
            _do_not_shrink(item)


def _do_not_shrink(item: pytest.Item) -> None:
    """The first example that fails kills: Hypothesis need not look for a simpler one, which takes minutes."""
    for holder, name in (
        (getattr(item, "obj", None), "_hypothesis_internal_use_settings"),
        (getattr(item, "cls", None), "settings"),  # of a state machine
    ):
        found = getattr(holder, name, None)
        if type(found).__module__.startswith("hypothesis"):
            from hypothesis import Phase, settings

            kept = [phase for phase in found.phases if phase not in (Phase.shrink, Phase.explain)]
            setattr(getattr(holder, "__func__", holder), name, settings(found, phases=kept))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    if last := os.environ.get("MUTANTS_LAST"):
        Path(last).write_text(item.nodeid)
    each = float(os.environ.get("MUTANTS_EACH", "0"))
    if each:
        signal.signal(signal.SIGALRM, _too_long)
        signal.setitimer(signal.ITIMER_REAL, each)
    try:
        return (yield)
    finally:
        if each:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _too_long(*_: object) -> None:
    pytest.fail("it takes too long for the map")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = os.environ.get("MUTANTS_UNTIL")
    if until and time.time() > float(until):
        pytest.skip("the time for the map is over")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if report.failed or report.skipped:
        _failed.add(report.nodeid)
    if report.failed and (killer := os.environ.get("MUTANTS_KILLER")):
        with Path(killer).open("a") as file:
            file.write(report.nodeid + "\n")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (times := os.environ.get("MUTANTS_TIMES")) and not hasattr(session.config, "workerinput"):
        passed = {name: round(s, 4) for name, s in _seconds.items() if name not in _failed}
        Path(times).write_text(json.dumps(passed))
