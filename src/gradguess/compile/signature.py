"""What a compiled or recorded step assumes, as a key: steps with equal keys do the same. This is the whole list.

layout    layers, hooks, training mode, parameters, what is frozen (`model.site.Members`)
values    plain values that Python code reads: attributes of modules and of what modules hold (configurations),
          closures, defaults, and the globals that `forward`, the loss and the functions that they name read
forms     shapes, strides, dtypes and devices of parameters, buffers, batch and state; what else is in the batch
settings  autocast, precision of products, the default dtype, deterministic algorithms

A recording assumes more: the memory of all tensors, and the groups of the optimiser (`captured_step`).

A trace records no guards of its own, so some changes cannot be seen: numbers that are changed in place in arrays of
NumPy, and in tensors that are neither parameters nor buffers; attributes of objects with `__slots__` or of extension
types; names that are put together while the code runs (`getattr(self, name)`, of other objects than modules); files,
environment variables and clocks. What Python does besides computing (a print, a count) is not done by a replay.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from enum import Enum
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from gradguess.compile.trace import NotTraceable
from gradguess.model.site import Layout, same_contents
from gradguess.model.task import Task
from gradguess.step.base import Kept

PLAIN = (bool, int, float, complex, str, bytes, type(None))
CONSTANT = (*PLAIN, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, Enum)
LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "gradguess"}  # their globals stay as they are


class Signatures:
    """Keys of steps. What code reads is read again only where something has changed."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[Any, Values, int]] = {}
        self._numbers: dict[Hashable, int] = {}  # of the values that were met
        self.changed: str | None = None  # what held another value when values were last read

    def of_step(self, task: Task, layout: Layout, *state: Kept) -> Hashable:
        """What losses, gradients and the new state depend on."""
        own = [*layout.members.parameters.values(), *layout.members.buffers().values()]
        sites = [(site, values) for part in state for site, values in (*part.items(), ("", {}))]
        kept = [(site, *values, *forms(values.values())) for site, values in sites]
        values = self._read("loss", task.loss_fn), self._read("model", task.model)
        devices = dict.fromkeys(t.device.type for t in own)
        return layout, values, batch(task.inputs), batch(task.targets), (*forms(own), *kept), settings(devices)

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


def settings(devices: Iterable[str]) -> Hashable:
    """What PyTorch's own switches say of precision."""
    autocast = tuple(torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in devices)
    exact = torch.are_deterministic_algorithms_enabled()
    return autocast, torch.get_float32_matmul_precision(), torch.get_default_dtype(), exact


def forms(tensors: Iterable[Tensor]) -> list[Hashable]:
    """What tensors are besides their numbers."""
    return [(t.dtype, t.shape, t.stride(), t.device) for t in tensors]


class Values:
    """The plain values that code reads, as a key, and whether they are still the same.

    Args:
        roots: modules, which are read with the modules inside them, and functions.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self._own: list[Any] = []  # dicts, lists and sets
        self._copies: list[Any] = []  # of them
        self._labels: list[str] = []  # whose they are
        self._globals: list[tuple[dict[str, Any], dict[str, Any]]] = []  # all of a file, and those that code reads
        self._read: dict[int, Any] = {}  # objects that were read; they stay alive, so that no other has their id
        functions = _functions_of(roots)
        self._names = set().union(*map(_names, functions))
        values = [self._value(root, "loss_fn") for root in roots]
        for function in filter(_is_own, functions.values()):
            values.append(self._in_globals(function.__globals__, _names(function.__code__)))
        self.key: Hashable = tuple(values)

    def changed(self) -> str | None:
        """What holds another value by now; None if all is the same."""
        now = [*self._own, *({name: space.get(name) for name in read} for space, read in self._globals)]
        before = [*self._copies, *(read for _, read in self._globals)]
        if same_contents(now, before):
            return None
        labels = [*self._labels, *(str(space.get("__name__")) for space, _ in self._globals)]
        for own, copy, label in zip(now, before, labels, strict=True):
            if isinstance(copy, dict) and not same_contents(own, copy):
                other = next(key for key in {**own, **copy} if own.get(key) is not copy.get(key))
                return f"{other!r} of {label}"
        return next(label for own, copy, label in zip(now, before, labels, strict=True) if not same_contents(own, copy))

    def _watch(self, container: Any, label: str) -> None:
        if id(container) not in self._read:
            self._read[id(container)] = container
            self._own.append(container)
            self._copies.append(container.copy())
            self._labels.append(label)

    def _in_globals(self, space: dict[str, Any], names: Iterable[str]) -> Hashable:
        read = {name: space[name] for name in sorted(names) if name in space}
        self._globals.append((space, read))
        return tuple((name, self._value(value, f"the global {name!r}")) for name, value in read.items())

    def _value(self, value: Any, label: str) -> Hashable:
        if isinstance(value, CONSTANT):
            return type(value), value
        if isinstance(value, Tensor):
            return Same(value)
        if id(value) in self._read:
            return "read before"
        if isinstance(value, (dict, list, set)):
            self._watch(value, label)
        else:
            self._read[id(value)] = value
        if isinstance(value, dict):
            return tuple((key, self._value(one, f"{key!r} of {label}")) for key, one in value.items())
        if isinstance(value, (list, tuple, set, frozenset)):
            return type(value), tuple(self._value(one, label) for one in value)
        if isinstance(value, nn.Module):
            return tuple(self._attributes(module) for module in value.modules())
        if isinstance(value, FunctionType):
            inside = (*_cells(value), value.__defaults__, value.__kwdefaults__, vars(value))
            return value.__code__, tuple(self._value(one, f"{label}, {value.__name__}") for one in inside)
        if isinstance(value, MethodType):
            return self._value(value.__func__, label), self._value(value.__self__, label)
        if isinstance(value, partial):
            return tuple(self._value(one, label) for one in (value.func, value.args, value.keywords))
        if isinstance(value, ModuleType):
            return self._in_globals(vars(value), self._names) if _is_own(value) else ()
        kind = value if isinstance(value, type) else type(value)
        opaque = not hasattr(value, "__dict__") or kind.__module__.partition(".")[0] in ("torch", "numpy")
        return Same(value) if opaque else self._attributes(value)

    def _attributes(self, thing: Any) -> Hashable:
        """Plain attributes of an object and of its classes, and those objects among them that the code names."""
        kind = thing if isinstance(thing, type) else type(thing)
        spaces: list[Any] = [vars(base) for base in kind.__mro__ if _is_own(base)]
        if thing is not kind:
            spaces.append(getattr(thing, "__dict__", {}))
        found: list[Hashable] = [kind]
        for space in spaces:
            self._watch(space, kind.__name__)
            counted = [(n, value) for n, value in space.items() if n not in _PYTORCHS and self._counts(n, value)]
            found.append(tuple((n, self._value(value, f"{n!r} of {kind.__name__}")) for n, value in counted))
        return tuple(found)

    def _counts(self, name: str, value: Any) -> bool:
        if isinstance(value, dict):
            return not name.startswith("_")
        return isinstance(value, (*CONSTANT, Tensor, list, tuple, set)) or (
            name in self._names and not isinstance(value, (FunctionType, property, nn.Module))
        )


_PYTORCHS = frozenset(vars(nn.Module())) - {"training", "forward"} | {"__module__", "__doc__", "__qualname__"}
_PYTORCHS |= {"_flat_weights", "_flat_weight_refs"}  # lists of parameters, made anew whenever one takes another's place


class Same:
    """A key for an object that may not be hashable: equal to itself alone. It keeps the object alive."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def _is_own(thing: Any) -> bool:
    """Whether a module of Python, a class or a function is the user's: libraries stay as they are."""
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None) or "builtins"
    return name.partition(".")[0] not in LIBRARIES


def _functions_of(roots: Iterable[Any]) -> dict[CodeType, FunctionType]:
    """The functions that the roots run, as far as the names in their code tell, by their code."""
    found: dict[CodeType, FunctionType] = {}
    todo: list[tuple[Any, type]] = []
    for root in roots:
        for one in root.modules() if isinstance(root, nn.Module) else (root,):
            todo.append((one, type(one)))
            todo.append((vars(one).get("forward") if isinstance(one, nn.Module) else None, type(one)))
            todo.append((getattr(type(one), "forward", type(one).__call__), type(one)))
    while todo:
        function, owner = todo.pop()
        function = getattr(function, "__func__", function)
        if isinstance(function, partial):
            todo.append((function.func, owner))
        if not isinstance(function, FunctionType) or function.__code__ in found:
            continue
        found[function.__code__] = function
        names = _names(function.__code__)
        todo += [(cell, owner) for cell in _cells(function)]
        if _is_own(function):
            todo += [(function.__globals__[name], owner) for name in names if name in function.__globals__]
        if _is_own(owner):  # helpers of the same class
            todo += [(getattr(owner, name, None), owner) for name in names]
    return found


def _names(code: CodeType) -> set[str]:
    """The names of globals and attributes in code, and in the functions inside it."""
    return set(code.co_names).union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))


def _cells(function: FunctionType) -> list[Any]:
    """What a closure holds; a cell may still be empty."""
    return [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
