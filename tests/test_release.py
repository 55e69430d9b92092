"""What a release is made of: one version, workflows with few rights, forms that GitHub can read."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import gradguess as gg

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RIGHTS = {  # of jobs, beyond reading
    "release": {"publish": {"id-token": "write"}},
    "docs": {"publish": {"pages": "write", "id-token": "write"}},
}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def jobs(path: Path) -> dict[str, Any]:
    return read(path)["jobs"]


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job["steps"]]


def stem(path: Path) -> str:
    return path.stem


def test_there_is_one_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert read(ROOT / "CITATION.cff")["version"] == gg.__version__
    assert re.findall(r"^## (\S+)", changelog, flags=re.MULTILINE)[0] == gg.__version__
    assert PROJECT["dynamic"] == ["version"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=stem)
def test_a_workflow_may_only_read(path: Path):
    assert read(path)["permissions"] == {"contents": "read"}
    rights = {name: job["permissions"] for name, job in jobs(path).items() if "permissions" in job}
    assert rights == RIGHTS.get(path.stem, {})
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", WORKFLOWS, ids=stem)
def test_workflows_call_targets_of_the_makefile(path: Path):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    called = {name for step in steps(path) for name in re.findall(r"^\s*make (\w+)", step.get("run", ""), re.MULTILINE)}
    assert called
    assert called <= targets


def test_names_that_the_policy_calls_public_exist():
    text = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    named = re.findall(r"`(gradguess(?:\.\w+)*)\.__all__`", text)
    assert named == ["gradguess", "gradguess.guesses", "gradguess.online", "gradguess.baselines"]
    for module in named:
        assert import_module(module).__all__
