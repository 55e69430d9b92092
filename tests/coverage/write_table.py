"""Write docs/coverage.md: python tests/coverage/write_table.py (`test_coverage.py` checks that it is up to date)."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

from coverage_layers import LAYERS  # noqa: E402
from coverage_outcome import COLUMNS, REFUSED, RIGHT, outcome  # noqa: E402

PLAIN = "Right with all of them: "
ALL = "all but pull back"
PAGE = HERE.parents[1] / "docs" / "coverage.md"
HEAD = """\
# Coverage

Every layer and loss below works with every guess and with learned feedback, but for what the table refuses (`weight` is
weight perturbation). Each layer stands between a stem and a head, all are sites, and `tests/coverage` compares with
autograd in float64:

- guesses: the directional derivative of each sample's loss is `Σ_i <y_i, g_i>` to 1e-9;
- feedback: chained, with as many sweeps as there are sites in a row, it is the gradient itself;
- pull back: true gradients at the sites give the true gradients of the parameters.

Where PyTorch has no forward-mode formula the error names the module, or the loss, and the way out. Guesses at sites
carry no tangent through a layer's own parameters, so they pass where weight perturbation cannot. `python
tests/coverage/write_table.py` writes this page.

"""
TAIL = """
## Batch norm in training mode

Take `coupling="batch"` in training mode: it is as unbiased as the guess, and its variance is larger by about the number
of samples. The default, `"sample"`, misses what a direction does through the batch's statistics, and warns
([sites](sites.md#batch-norm-and-other-layers-that-mix-samples)).

## Mixed precision

Under `torch.autocast` tangents have the dtype of the values they belong to; directions are drawn and bases are found in
float32. Derivatives agree with backpropagation under the same bfloat16 autocast to 5 % (tested).

## Tied, frozen and adapted weights

A tied weight gets the sum over its uses. Frozen parameters get no gradient, and frozen layers are no sites. A LoRA
adapter is a branch beside the frozen layer: with `sites="auto"` its last layer is the site.
"""


def table() -> str:
    plain, rows = [], ["| layer | refused | note |", "| --- | --- | --- |"]
    for layer, row in LAYERS.items():
        found = {column: outcome(layer, column) for column in COLUMNS}
        assert set(found.values()) <= {RIGHT, REFUSED}, (layer, found)
        refused = ", ".join(column for column in COLUMNS if found[column] == REFUSED)
        if refused or row.note:
            rows.append(f"| {layer} | {refused.replace(', '.join(COLUMNS[:-1]), ALL)} | {row.note} |")
        else:
            plain.append(layer)
    return textwrap.fill(f"{PLAIN}{'; '.join(plain)}.", 120, break_on_hyphens=False) + "\n\n" + "\n".join(rows) + "\n"


def read(page: str) -> dict[str, tuple[set[str], str]]:
    """layer -> columns that are refused, note."""
    (plain,) = re.findall(rf"^{PLAIN}(.*?)\.\n\n", page, flags=re.DOTALL | re.MULTILINE)
    found: dict[str, tuple[set[str], str]] = {layer: (set(), "") for layer in " ".join(plain.split()).split("; ")}
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    for layer, refused, note in lines[2:]:
        found[layer] = (set(COLUMNS[:-1] if refused == ALL else filter(None, refused.split(", "))), note)
    return found


if __name__ == "__main__":
    PAGE.write_text(HEAD + table() + TAIL)
    print(PAGE)
