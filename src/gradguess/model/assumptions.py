"""What a step that is compiled or recorded assumes, asked before each of its replays. This is the whole list.

Members   layers, hooks, training mode, parameters, what is frozen: a change needs another layout as well
Values    plain values that Python code reads: attributes of modules and of what modules hold (configurations),
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
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None))
CONSTANT = (*PLAIN, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, Enum)
LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "gradguess"}  # their globals stay as they are
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Members:
    """The modules and parameters of a model, listed once: a walk over the model takes as long as a small layer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.size = sum(p.numel() for p in self.parameters.values())
        self.name_of = {id(p): name for name, p in self.parameters.items()}
        self.modules = list(model.modules())
        self._training = [module.training for module in self.modules]
        self._own = [vars(module) for module in self.modules]
        self._forwards = [own.get("forward") for own in self._own]  # one that was put on a module
        dicts = [own[name] for own in self._own for name in (*_HOOKS, "_modules", "_parameters")]
        self._empty = [inside for inside in dicts if not inside]
        self._filled = [inside for inside in dicts if inside]
        self._copies = [inside.copy() for inside in self._filled]
        self._slots = [p for own in self._own for p in own["_parameters"].values() if p is not None]
        self._free = [p.requires_grad for p in self._slots]

    def buffers(self) -> dict[str, Tensor]:
        """The buffers as they are now, without a walk where there are none."""
        return dict(self.model.named_buffers()) if any(module._buffers for module in self.modules) else {}

    def current(self) -> bool:
        """Whether layers, hooks, training mode, parameters and what is frozen are still the same."""
        return (
            [p.requires_grad for p in self._slots] == self._free
            and [module.training for module in self.modules] == self._training
            and [own.get("forward") for own in self._own] == self._forwards
            and not any(self._empty)
            and _equal(self._filled, self._copies)
        )

    @property
    def key(self) -> Hashable:
        """Equal for members that are the same objects in the same state."""
        contents = tuple((key, id(value)) for copy in self._copies for key, value in copy.items())
        sizes = tuple(len(own[name]) for own in self._own for name in (*_HOOKS, "_modules", "_parameters"))
        return contents, sizes, tuple(self._training), tuple(self._free), tuple(map(id, self._forwards))


def _equal(own: Any, copy: Any) -> bool:
    """Whether containers hold the same. Objects that are identical are not looked into."""
    try:
        return bool(own == copy)
    except (RuntimeError, TypeError, ValueError):  # tensors and arrays are compared number by number
        return False


class Values:
    """The plain values that code reads, as a key, and whether they are still the same.

    Args:
        roots: modules, which are read with the modules inside them, and functions.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self._own: list[Any] = []  # dicts, lists and sets
        self._copies: list[Any] = []  # of them
        self._labels: list[str] = []  # whose they are
        self._globals: list[tuple[dict[str, Any], list[str], list[Any]]] = []
        self._read: dict[int, Any] = {}  # objects that were read; they stay alive, so that no other has their id
        functions = _functions_of(roots)
        self._names = set().union(*map(_names, functions))
        values = [self._value(root, "loss_fn") for root in roots]
        for function in filter(_is_own, functions.values()):
            values.append(self._in_globals(function.__globals__, _names(function.__code__)))
        self.key: Hashable = tuple(values)

    def changed(self) -> str | None:
        """What holds another value by now; None if all is the same."""
        for space, names, values in self._globals:
            now = [space.get(name) for name in names]
            if not _equal(now, values):
                other = (name for name, a, b in zip(names, now, values, strict=True) if not _equal(a, b))
                return f"the global {next(other)!r} of {space.get('__name__')}"
        if _equal(self._own, self._copies):
            return None
        for own, copy, label in zip(self._own, self._copies, self._labels, strict=True):
            if isinstance(copy, dict) and not _equal(own, copy):
                return f"{next(key for key in {**own, **copy} if own.get(key) is not copy.get(key))!r} of {label}"
        pairs = zip(self._own, self._copies, self._labels, strict=True)
        return next(label for own, copy, label in pairs if not _equal(own, copy))

    def _watch(self, container: Any, label: str) -> None:
        if id(container) not in self._read:
            self._read[id(container)] = container
            self._own.append(container)
            self._copies.append(container.copy())
            self._labels.append(label)

    def _in_globals(self, space: dict[str, Any], names: Iterable[str]) -> Hashable:
        found = sorted(name for name in names if name in space)
        self._globals.append((space, found, [space[name] for name in found]))
        return tuple((name, self._value(space[name], f"the global {name!r}")) for name in found)

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
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            continue
    return found


def settings(devices: Iterable[str]) -> Hashable:
    """What PyTorch's own switches say of precision."""
    autocast = tuple(torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in devices)
    exact = torch.are_deterministic_algorithms_enabled()
    return autocast, torch.get_float32_matmul_precision(), torch.get_default_dtype(), exact


def forms(tensors: Iterable[Tensor]) -> list[Hashable]:
    """What tensors are besides their numbers."""
    return [(t.dtype, t.shape, t.stride(), t.device) for t in tensors]
