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
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = ["3.11", "3.12", "3.13"]
RIGHTS = {  # of jobs, beyond reading
    "release": {"publish": {"id-token": "write"}},
    "docs": {"publish": {"pages": "write", "id-token": "write"}},
}
# an action with a major version, and the branch that its authors name for it
PINNED = re.compile(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)")


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


def test_the_metadata_names_the_versions_of_python_that_are_tested():
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d", line)]
    assert named == PYTHONS == jobs(ROOT / ".github/workflows/tests.yml")["test"]["strategy"]["matrix"]["python"]
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


def test_the_workflows_are_these():
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "tests"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=stem)
def test_a_workflow_may_only_read(path: Path):
    assert read(path)["permissions"] == {"contents": "read"}
    rights = {name: job["permissions"] for name, job in jobs(path).items() if "permissions" in job}
    assert rights == RIGHTS.get(path.stem, {})
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", WORKFLOWS, ids=stem)
def test_actions_are_pinned_and_jobs_end(path: Path):
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert used
    assert [name for name in used if not PINNED.fullmatch(name)] == []
    assert all(job["timeout-minutes"] <= 60 for job in jobs(path).values())


@pytest.mark.parametrize("path", WORKFLOWS, ids=stem)
def test_workflows_call_targets_of_the_makefile(path: Path):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    called = {name for step in steps(path) for name in re.findall(r"^\s*make (\w+)", step.get("run", ""), re.MULTILINE)}
    assert called
    assert called <= targets


def test_a_pull_request_does_not_publish_the_site():
    assert jobs(ROOT / ".github/workflows/docs.yml")["publish"]["if"] == "github.event_name == 'push'"
    assert read(ROOT / ".github/workflows/docs.yml")[True]["push"] == {"branches": ["main"]}


def test_a_tag_alone_publishes():
    release = read(ROOT / ".github/workflows/release.yml")
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as a truth value
    assert release["jobs"]["publish"]["needs"] == "build"


@pytest.mark.parametrize("path", FORMS, ids=stem)
def test_a_form_has_what_github_asks_for(path: Path):
    form = read(path)
    assert {"name", "description", "body"} <= form.keys()
    assert {field["type"] for field in form["body"]} <= {"input", "textarea", "dropdown", "checkboxes", "markdown"}
    names = [field["id"] for field in form["body"]]
    assert len(set(names)) == len(names)
    assert all(field["attributes"]["label"] for field in form["body"])
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_the_forms_are_these():
    assert [path.stem for path in FORMS] == ["bug", "number", "question"]


def test_hooks_are_the_tools_of_make_lint():
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert [hook["id"] for hook in repository["hooks"]] == ["ruff", "ruff-format", "mypy"]
    assert all(hook["entry"].startswith(".venv/bin/") and hook["language"] == "system" for hook in repository["hooks"])


def test_names_that_the_policy_calls_public_exist():
    text = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    named = re.findall(r"`(gradguess(?:\.\w+)*)\.__all__`", text)
    assert named == ["gradguess", "gradguess.guesses", "gradguess.online", "gradguess.baselines"]
    for module in named:
        assert import_module(module).__all__
