"""The public surface is the one in `test_public_surface.txt`, and typed programs of users pass mypy --strict.

After a wanted change of a name or an annotation write the record anew and look at the difference:

    python tests/test_public_surface.py && git diff tests/test_public_surface.txt
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

import gradguess

ROOT, RECORD = Path(__file__).parents[1], Path(__file__).with_suffix(".txt")
PROGRAM = """
import torch, gradguess as gg
from torch import Tensor, nn

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
loss_fn = nn.CrossEntropyLoss(reduction="none")
x, t = torch.randn(3, 4), torch.tensor([0, 1, 2])
forward = gg.ForwardGradient(model, gg.Feedback(gg.WPerp(k=2), form="direct"), memory="replay")
loss: Tensor = forward(loss_fn, x, t)
forward.load_state_dict(forward.state_dict())
estimate: gg.Estimate = gg.estimate(model, gg.WPerpNS(k=2), loss_fn, x, t, tangents=2)
shapes: dict[str, torch.Size] = {name: grad.shape for name, grad in estimate.grads.items()}
bias: float = gg.diagnose(model, gg.WTranspose(), loss_fn, x, t)["0"].bias
online = gg.online.Online(gg.online.Recurrent(nn.GRUCell(4, 8), nn.Linear(8, 3)), gg.online.RTRL())
later: Tensor = online(loss_fn, x, t)
"""


def described(name: str, one: object) -> str:
    """A function or class with its signature, an attribute with its type, an error with its bases."""
    if inspect.isclass(one) and issubclass(one, Exception):
        return f"{name}({', '.join(base.__name__ for base in one.__bases__)})"
    shown = inspect.signature(one.fget if isinstance(one, property) else one)  # type: ignore[arg-type]
    return name + re.sub("""['"]""", "", str(shown))


def surface() -> str:
    """What the reference lists, which `test_docs.py` holds complete; `gradguess.integrations` needs other libraries."""
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    found = []
    for entry in re.split("(?m)^::: ", pages)[1:]:
        path, name = entry.split()[0], re.search("heading: (.*)", entry)[1]
        if not path.startswith("gradguess.integrations"):
            one, members = resolve_name(path), re.findall(r"members: \[(.*)\]", entry)
            lines = [described(name, one)]
            typed = inspect.get_annotations(one).items() if inspect.isclass(one) else ()
            lines += [f"{name}: {kind}" for name, kind in typed if f"{name}:" not in lines[0] and name[0] != "_"]
            for name in members[0].split(", ") if members else []:  # some stand in __init__ alone
                lines.append(described(name, getattr(one, name)) if hasattr(one, name) else name)
            found.append("\n    ".join(lines))
    return "\n".join(["gradguess: " + ", ".join(gradguess.__all__), *sorted(found)]) + "\n"


def test_the_public_surface_is_the_recorded_one():
    assert surface().splitlines() == RECORD.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_a_typed_program_passes_a_strict_check(tmp_path: Path):
    assert (Path(gradguess.__file__).parent / "py.typed").is_file()
    options = ["--strict", "--follow-imports=silent", "--config-file=", f"--cache-dir={tmp_path}", "-c", PROGRAM]
    path = {"MYPYPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-m", "mypy", *options], capture_output=True, text=True, env=path)
    assert done.returncode == 0, done.stdout
    exec(compile(PROGRAM, "program", "exec"), {})


if __name__ == "__main__":
    RECORD.write_text(surface(), encoding="utf-8")
