"""What tells the steps of one model apart: `model.assumptions`, as a key. Steps with equal keys do the same."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from gradguess.backends.tracing import NotTraceable
from gradguess.model.assumptions import PLAIN, Values, forms, settings
from gradguess.model.site import Layout
from gradguess.model.task import Task
from gradguess.step.base import Kept


class Signatures:
    """Keys of steps. What code reads is read again only where something has changed."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[Any, Values, int]] = {}
        self._numbers: dict[Hashable, int] = {}  # of the values that were met
        self.changed: str | None = None  # what held another value when values were last read

    def of_model(self, task: Task, layout: Layout) -> Hashable:
        """What the outputs depend on."""
        own = [*layout.members.parameters.values(), *layout.members.buffers().values()]
        devices = dict.fromkeys(t.device.type for t in own)
        return layout, batch(task.inputs), tuple(forms(own)), settings(devices), self._read("model", task.model)

    def of_step(self, task: Task, layout: Layout, *state: Kept) -> Hashable:
        """What losses, gradients and the new state depend on."""
        kept = tuple(
            (site, *values, *forms(values.values())) for part in state for site, values in (*part.items(), ("", {}))
        )
        return self._read("loss", task.loss_fn), batch(task.targets), kept, self.of_model(task, layout)

    def _read(self, name: str, root: Any) -> int:
        known = self._values.get(name)
        other = None if known is None else known[1].changed()
        if known is None or known[0] is not root or other is not None:
            values = Values([root])
            known = self._values[name] = root, values, self._numbers.setdefault(values.key, len(self._numbers))
            self.changed = other or self.changed
        return known[2]


def batch(tree: Any) -> Hashable:
    """Form and plain values of inputs or targets."""
    leaves, spec = tree_flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise NotTraceable(f"Inputs or targets hold a {type(leaf).__name__}: expected tensors, numbers and text.")
    return str(spec), tuple(forms([leaf])[0] if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)
