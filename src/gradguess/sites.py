"""Sites: the places where a gradient is guessed.

A *site* is one call of a module, together with the tensor it returns. A pass over the model visits its sites in
the order of the forward pass (`Watch`). Which sites there are, what follows each of them and which parameters
lie below it is read off the autograd graph of one small pass that is cut at every site (`lay_out`): the graph is
the same whether a model is written with modules or with functions, and it needs no tracing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradguess.errors import InputError
from gradguess.gates import Gate, gate_of, mask
from gradguess.isolation import untouched
from gradguess.positions import FULL, Pattern, pattern_of
from gradguess.pullback import has_closed_form
from gradguess.task import Task, check_model, tensors

PROBE = 3  # samples in the pass that finds the sites
Sites = str | Sequence[str]


@dataclass(frozen=True, eq=False)
class Site:
    """One call of one module, and what the cut graph says about its output `s`."""

    name: str
    module_name: str
    module: nn.Module
    call: int
    slot: int  # which tensor of the module's output
    batch_dim: int | None  # None: the output is shared by the batch (a position embedding)
    gate: Gate | None  # derivative of the one elementwise function that consumes it
    above: tuple[str, ...]  # the sites that its output reaches without crossing another
    reaches_output: bool  # and whether it reaches the loss so
    is_output: bool  # its output is the model's output, unchanged
    linear: nn.Linear | None  # set where the whole path above is elementwise -> this linear layer
    parameters: tuple[str, ...]  # parameters on the paths that end here and cross no other site
    pattern: Pattern = FULL  # its positions, and how feedback is shared over them

    @property
    def top(self) -> bool:
        """Nothing above: the paper draws N(0, I) here."""
        return not self.above

    def flat(self, s: Tensor) -> Tensor:
        """`s` as (batch, d); (1, d) where it is shared by the batch."""
        if self.batch_dim is None:
            return s.reshape(1, -1)
        return s.movedim(self.batch_dim, 0).flatten(1) if s.dim() > 1 else s.unsqueeze(1)

    def unflat(self, v: Tensor, like: Tensor) -> Tensor:
        """The inverse of `flat`, in the shape and dtype of `like`."""
        if self.batch_dim:
            shape = like.movedim(self.batch_dim, 0).shape
            return v.reshape(shape).movedim(0, self.batch_dim).to(like.dtype)
        return v.reshape(like.shape).to(like.dtype)


class LayoutChanged(Exception):
    """The model made other calls than when it was laid out: lay it out again."""


class Members:
    """The modules and parameters of a model, listed once: walking over a model takes as long as a small layer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.name_of = {id(p): name for name, p in self.parameters.items()}
        self.modules = [(module, module.training) for module in model.modules()]
        self._slots = [
            (module, name, p, p.requires_grad)
            for module, _ in self.modules
            for name, p in module._parameters.items()
            if p is not None
        ]

    def current(self) -> bool:
        """Are training mode, parameters and what is frozen still the same?"""
        return all(module.training == mode for module, mode in self.modules) and all(
            module._parameters.get(name) is p and p.requires_grad == free for module, name, p, free in self._slots
        )


@dataclass(frozen=True, eq=False)
class Layout:
    """The sites of a model in call order, and what a pass over it has to watch for."""

    sites: tuple[Site, ...]
    closed: bool  # every parameter's gradient has a closed form at its own site
    tail: tuple[str, ...]  # parameters between the last sites and the loss
    reached: tuple[str, ...]  # parameters that the loss depends on
    sliceable: bool  # the first dimension of the inputs is the batch
    stochastic: bool  # a pass draws from the global generators (dropout)
    mutates: bool  # a pass writes buffers (batch norm)
    members: Members  # what it depends on besides the model's code
    calls: Mapping[nn.Module, int]  # how often each watched module was called
    idle: tuple[nn.Module, ...] = ()  # modules with trainable parameters that were not called

    @cached_property
    def at(self) -> Mapping[tuple[nn.Module, int], tuple[Site, ...]]:
        """The sites of each call, one per tensor that it returns."""
        table: dict[tuple[nn.Module, int], tuple[Site, ...]] = {}
        for site in self.sites:
            key = (site.module, site.call)
            table[key] = (*table.get(key, ()), site)
        return table

    @cached_property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(dict.fromkeys(site.module for site in self.sites))

    @cached_property
    def chain(self) -> bool:
        """Linear layers in a row, ReLUs between them, the last one's output the model's own; nothing random."""
        if self.stochastic or self.mutates or not self.closed or len(self.sites) < 2:
            return False
        top = self.sites[-1]
        if not top.is_output or top.gate is not None or top.batch_dim != 0:
            return False
        return all(_leads_to(site, above) for site, above in pairwise(self.sites))

    @cached_property
    def row(self) -> tuple[nn.Module, ...]:
        """The layers of a chain that is an `nn.Sequential` of them and of ReLUs: a pass may run them one by one.

        Empty where it is not.
        """
        layers = list(unrolled(self.members.model))
        if not self.chain or [layer for layer in layers if type(layer) is nn.Linear] != [s.module for s in self.sites]:
            return ()
        return tuple(layers) if all(type(layer) in (nn.Linear, nn.ReLU, nn.Identity) for layer in layers) else ()

    @cached_property
    def _by_name(self) -> Mapping[str, Site]:
        return {site.name: site for site in self.sites}

    def __getitem__(self, name: str) -> Site:
        return self._by_name[name]


def _leads_to(site: Site, above: Site) -> bool:
    plain = type(site.module) is nn.Linear and site.linear is above.module and site.above == (above.name,)
    return plain and site.gate in (None, mask)


def unrolled(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested `nn.Sequential`s, in the order in which they are called."""
    if type(module) is nn.Sequential:
        for child in module:
            yield from unrolled(child)
    else:
        yield module


Visit = Callable[[Site, Tensor, Tensor], Tensor]


class Watch:
    """While open, `visit(site, x, s)` is called at each site and what it returns takes the place of `s`."""

    def __init__(self, layout: Layout, visit: Visit) -> None:
        self.layout = layout
        self.visit = visit
        self.calls: dict[nn.Module, int] = {}
        self.visited = 0

    def __enter__(self) -> Watch:
        self.handles = [
            module.register_forward_hook(self._hook, with_kwargs=True)
            for module in (*self.layout.modules, *self.layout.idle)
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        if kind is None and self.visited != len(self.layout.sites):
            raise LayoutChanged

    def _hook(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        call = self.calls.get(module, 0)
        self.calls[module] = call + 1
        sites = self.layout.at.get((module, call))
        if sites is None:
            if call < self.layout.calls.get(module, 0):
                return output
            raise LayoutChanged
        x = first_tensor(args, kwargs)
        if isinstance(output, Tensor):
            self.visited += 1
            return self.visit(sites[0], x, output)
        leaves, spec = tree_flatten(output)
        for site in sites:
            self.visited += 1
            leaves[site.slot] = self.visit(site, x, leaves[site.slot])
        return tree_unflatten(leaves, spec)


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The input `x` of a layer."""
    return args[0] if args else next(iter(kwargs.values()), None)


# --- finding the sites ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Call:
    """One call seen in the cut pass: its input, and per returned tensor the value below and above the cut."""

    name: str
    module: nn.Module
    index: int
    x: Any
    slots: dict[int, tuple[Tensor, Tensor]]  # slot -> (s with the graph below it, leaf above the cut)


Want = Callable[[nn.Module, int], bool]


class _CutPass:
    """A pass with a reverse graph that is cut at every call that `want` names (default: every leaf)."""

    def __init__(self, model: nn.Module, want: Want | None) -> None:
        self.model = model
        self.want = want
        self.calls: list[_Call] = []
        self.counts: dict[nn.Module, int] = {}
        self.stack: list[bool] = []  # per open module: was a site met inside?
        self.ends: list[Tensor] = []  # the model's outputs

    def run(self, task: Task) -> Tensor:
        handles = []
        for name, module in _candidates(self.model, self.want is not None):
            handles.append(module.register_forward_pre_hook(lambda *_: self.stack.append(False)))
            handles.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
        try:
            with torch.enable_grad():
                outputs = task.outputs()
                self.ends = tensors(outputs)
                return task.losses(outputs)
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            index = self.counts.get(module, 0)
            self.counts[module] = index + 1
            container = self.stack.pop()
            wanted = not container if self.want is None else self.want(module, index)
            if not wanted:
                if container and self.stack:
                    self.stack[-1] = True
                return output
            if self.stack:
                self.stack[-1] = True
            return self._cut(name, module, index, first_tensor(args, kwargs), output)

        return hook

    def _cut(self, name: str, module: nn.Module, index: int, x: Any, output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        slots = {}
        for slot, s in enumerate(leaves):
            if isinstance(s, Tensor) and s.is_floating_point() and s.requires_grad:
                leaf = s.detach().requires_grad_()
                slots[slot] = (s, leaf)
                leaves[slot] = leaf.clone()  # a leaf must not be changed in place, a clone may
        if slots:
            self.calls.append(_Call(name, module, index, x, slots))
        return tree_unflatten(leaves, spec)


def _candidates(model: nn.Module, explicit: bool) -> Iterable[tuple[str, nn.Module]]:
    """Modules that own trainable parameters themselves; with `explicit`, every module."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        parametrized = parametrize.is_parametrized(module)
        if parametrized:
            inside.update(module.parametrizations.modules())
        owned = module.parameters(recurse=parametrized)
        if (explicit and module is not model) or any(p.requires_grad for p in owned):
            yield name, module


class _Graph:
    """The autograd graph below a set of roots: who consumes a node, and which leaves a root reaches."""

    def __init__(self, roots: Iterable[Tensor]) -> None:
        self.consumers: dict[Any, list[Any]] = {}
        self.nodes: dict[Any, None] = {}
        self.alive = list(roots)
        todo = [root.grad_fn for root in self.alive if root.grad_fn is not None]
        while todo:
            node = todo.pop()
            if node in self.nodes:
                continue
            self.nodes[node] = None
            for below, _ in node.next_functions:
                if below is not None:
                    self.consumers.setdefault(below, []).append(node)
                    todo.append(below)

    def leaves(self, root: Tensor | Any, stop: Callable[[Any], bool] = lambda node: False) -> set[int]:
        """`id`s of the leaf tensors reached from `root` along nodes for which `stop` is false."""
        start = root.grad_fn if isinstance(root, Tensor) else root
        seen: set[Any] = set()
        found: set[int] = set()
        todo = [start] if start is not None else []
        while todo:
            node = todo.pop()
            if node in seen or (node is not start and stop(node)):
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                found.add(id(node.variable))
            todo.extend(below for below, _ in node.next_functions if below is not None)
        return found

    def leaf_nodes(self) -> dict[int, Any]:
        return {id(node.variable): node for node in self.nodes if hasattr(node, "variable")}


def lay_out(task: Task, sites: Sites = "auto", *, whole: bool = False) -> Layout:
    """Find the sites of `task.model` from a cut graph on a few samples. Leaves no trace in the model.

    With `whole`, on the whole batch: for models whose calls depend on all of it.
    """
    _check_trainable(task.model)
    with untouched(task.model) as traces:
        probe, sliceable, shapes = (task, False, {}) if whole else _probe(task)
        want = _wanted(task.model, sites)
        cut = _CutPass(probe.model, want)
        losses = cut.run(probe)
        stochastic, mutates = traces()
        if not cut.calls:
            raise InputError(_no_site_message(sites))
        if sites in ("auto", "branch"):
            chosen = _branch_calls(cut, losses)
            if chosen:
                cut = _CutPass(probe.model, lambda module, index: (module, index) in chosen)
                losses = cut.run(probe)
    return _read(task.model, cut, losses, shapes, sliceable=sliceable, stochastic=stochastic, mutates=mutates)


Shapes = dict[tuple[nn.Module, int], list[torch.Size | None]]  # of the tensors that each call returned


def _probe(task: Task) -> tuple[Task, bool, Shapes]:
    """A few samples of the task if it can be cut along the first dimension, else all of it.

    Also the shapes that its modules return on fewer samples: the dimension that changes is the batch.
    """
    found = [t for t in _all_tensors(task.inputs) if t.dim() > 0]
    batch = found[0].shape[0] if found else 0
    if batch == 0:
        return task, False, {}
    rows = min(PROBE, batch)
    fewer = task.rows(max(1, rows - 1), batch)
    shapes: Shapes = {}
    try:
        with torch.no_grad(), _noting(shapes, task.model):
            sliceable = fewer.losses(fewer.outputs()).shape[0] == max(1, rows - 1)
    except Exception:
        sliceable = False
    if not sliceable:
        return task, False, {}
    return task.rows(rows, batch), True, shapes if rows > 1 else {}


@contextmanager
def _noting(shapes: Shapes, model: nn.Module) -> Iterator[None]:
    counts: dict[nn.Module, int] = {}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        call = counts.get(module, 0)
        counts[module] = call + 1
        leaves = tree_flatten(output)[0]
        shapes[module, call] = [leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves]

    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _all_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _wanted(model: nn.Module, sites: Sites) -> Want | None:
    if isinstance(sites, str):
        if sites not in ("auto", "leaf", "branch"):
            raise InputError(
                f"sites: expected 'auto', 'leaf', 'branch' or a list of module names, found {sites!r}. "
                f"For one module write sites=[{sites!r}]."
            )
        return None
    modules = dict(model.named_modules())
    for name in sites:
        if name not in modules or name == "":
            near = difflib.get_close_matches(name, [key for key in modules if key], n=3, cutoff=0.3)
            raise InputError(f"sites: the model has no module named {name!r}. Nearest: {near}.")
    chosen = {modules[name] for name in sites}
    if not chosen:
        raise InputError("sites: the list of module names is empty. Name at least one, or use sites='auto'.")
    return lambda module, index: module in chosen


def _no_site_message(sites: Sites) -> str:
    if isinstance(sites, str):
        return (
            "No module with trainable parameters was called in the forward pass, so there is no site. Call layers "
            "as modules (self.fc(x), not F.linear(x, self.fc.weight)), name containers with sites=[...], or use "
            "gg.WeightPerturbation(), which needs no sites."
        )
    return f"None of the modules {list(sites)} was called in the forward pass, or none gave a differentiable tensor."


def _is_data_addition(node: Any, graph: _Graph, cut_leaves: set[int]) -> bool:
    """An addition of two activations that come from different sites: a residual connection or a merge."""
    if node.name() != "AddBackward0":
        return False
    below = [n for n, _ in node.next_functions if n is not None]
    if len(below) != 2:
        return False
    left, right = (graph.leaves(n) & cut_leaves for n in below)
    return bool(left) and bool(right) and left != right


def _branch_calls(cut: _CutPass, losses: Tensor) -> set[tuple[nn.Module, int]]:
    """The calls that feed an addition directly, and those above which there is no other; none without additions."""
    owner = {id(leaf): call for call in cut.calls for _, leaf in call.slots.values()}
    graph = _Graph([losses, *(s for call in cut.calls for s, _ in call.slots.values())])
    inside = _Graph([*cut.ends, *(s for call in cut.calls for s, _ in call.slots.values())])
    additions = {node for node in inside.nodes if _is_data_addition(node, graph, set(owner))}  # none of the loss's
    if not additions:
        return set()
    feeding: set[int] = set()
    for node in additions:
        for below, _ in node.next_functions:
            if below is not None and below not in additions:
                feeding |= graph.leaves(below, stop=lambda n: n in additions)
    below_sites = set().union(*(graph.leaves(s) for call in cut.calls for s, _ in call.slots.values()))
    tops = graph.leaves(losses) - below_sites
    return {(owner[key].module, owner[key].index) for key in feeding | tops if key in owner}


def _read(
    model: nn.Module, cut: _CutPass, losses: Tensor, shapes: Shapes, *, sliceable: bool, stochastic: bool, mutates: bool
) -> Layout:
    """Turn the cut graph into a layout."""
    names = {id(leaf): (call, slot) for call in cut.calls for slot, (_, leaf) in call.slots.items()}
    parameters = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    roots = {(call, slot): s for call in cut.calls for slot, (s, _) in call.slots.items()}
    graph = _Graph([losses, *roots.values()])
    reach = {key: graph.leaves(s) for key, s in roots.items()}
    at_output = graph.leaves(losses)
    used = _used(names, reach, at_output)
    title = {(call, slot): _title(call, slot, used) for call, slot in used}
    nodes = graph.leaf_nodes()
    found = []
    for call, slot in used:
        s, leaf = call.slots[slot]
        above = [key for key in used if id(leaf) in reach[key]]
        gate, end = _follower(graph, nodes[id(leaf)])
        fewer = shapes.get((call.module, call.index), [])
        batch_dim = _batch_dim(s, losses.shape[0], fewer[slot] if slot < len(fewer) else None)
        plain = s.dim() == 2 and batch_dim == 0 and id(leaf) not in at_output
        found.append(
            Site(
                name=title[call, slot],
                module_name=call.name,
                module=call.module,
                call=call.index,
                slot=slot,
                batch_dim=batch_dim,
                gate=gate,
                above=tuple(title[key] for key in above),
                reaches_output=id(leaf) in at_output,
                is_output=gate is None and len(cut.ends) == 1 and cut.ends[0].grad_fn is end,
                linear=_linear_above(above, end, graph) if plain else None,
                parameters=tuple(name for key, name in parameters.items() if key in reach[call, slot]),
                pattern=pattern_of(call.module, s, batch_dim, cut.ends),
            )
        )
    tail = tuple(name for key, name in parameters.items() if key in at_output)
    reached = set(tail).union(*(site.parameters for site in found))
    return Layout(
        sites=tuple(found),
        closed=not tail and _all_closed(found, reached, graph, nodes, model),
        tail=tail,
        reached=tuple(name for name in parameters.values() if name in reached),
        sliceable=sliceable,
        stochastic=stochastic,
        mutates=mutates,
        members=Members(model),
        calls=cut.counts,
        idle=tuple(module for _, module in _candidates(model, False) if module not in cut.counts),
    )


def _check_trainable(model: nn.Module) -> None:
    check_model(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError(
            "The model has no parameter that requires a gradient: there is nothing to estimate. "
            "Set requires_grad_(True) on what should be trained."
        )


def bare_layout(task: Task) -> Layout:
    """No sites: for methods that need none."""
    _check_trainable(task.model)
    with untouched(task.model) as traces, torch.no_grad():
        task.outputs()
        stochastic, mutates = traces()
    return Layout((), False, (), (), False, stochastic, mutates, Members(task.model), {})


def _used(
    names: dict[int, tuple[_Call, int]], reach: dict[tuple[_Call, int], set[int]], at_output: set[int]
) -> list[tuple[_Call, int]]:
    """The cut tensors on which the loss depends, in call order."""
    key_of = {key: leaf for leaf, key in names.items()}
    todo = [names[leaf] for leaf in at_output if leaf in names]
    seen: set[tuple[_Call, int]] = set()
    while todo:
        key = todo.pop()
        if key not in seen:
            seen.add(key)
            todo.extend(names[leaf] for leaf in reach[key] if leaf in names)
    return [key for key in key_of if key in seen]


def _title(call: _Call, slot: int, used: Sequence[tuple[_Call, int]]) -> str:
    """The module's name; `#1` for its second call; `[2]` for a further tensor that the call returned."""
    name = call.name or type(call.module).__name__
    name += f"#{call.index}" if call.index else ""
    return name if slot == min(s for c, s in used if c is call) else f"{name}[{slot}]"


def _batch_dim(s: Tensor, batch: int, fewer: torch.Size | None) -> int | None:
    """The dimension of the batch: of its size, and smaller in the shape that `fewer` samples gave."""
    dims = [dim for dim in (0, 1) if dim < s.dim() and s.shape[dim] == batch]
    if fewer is not None and len(fewer) == s.dim():
        dims = [dim for dim in dims if fewer[dim] != s.shape[dim]]
    return dims[0] if dims else None


def _follower(graph: _Graph, leaf: Any) -> tuple[Gate | None, Any]:
    """The gate of a site, and the node whose output is all that the rest of the graph sees of it."""
    node = leaf
    consumers = graph.consumers.get(node, [])
    if len(consumers) == 1 and consumers[0].name() == "CloneBackward0":
        node = consumers[0]
        consumers = graph.consumers.get(node, [])
    if len(consumers) == 1:
        gate = gate_of(consumers[0])
        if gate is not None:
            return gate, consumers[0]
    return None, node


def _linear_above(above: Sequence[tuple[_Call, int]], end: Any, graph: _Graph) -> nn.Linear | None:
    """The linear layer above, if all paths are elementwise -> that layer and nothing else."""
    if len(above) != 1 or len(graph.consumers.get(end, [])) != 1:
        return None
    call = above[0][0]
    plain = type(call.module) is nn.Linear and isinstance(call.x, Tensor) and call.x.dim() == 2
    return call.module if plain and call.x.grad_fn is end else None  # type: ignore[return-value]


def _all_closed(
    sites: Sequence[Site], reached: set[str], graph: _Graph, nodes: dict[int, Any], model: nn.Module
) -> bool:
    """Is every parameter used by its own site's layer alone, and does that layer have a closed form?"""
    uses: dict[int, int] = {}
    for site in sites:
        if not has_closed_form(site.module):
            return False
        for p in site.module.parameters(recurse=False):
            uses[id(p)] = uses.get(id(p), 0) + 1
    for name, p in model.named_parameters():
        if name in reached and len(graph.consumers.get(nodes.get(id(p)), [])) != uses.get(id(p), 0):
            return False
    return True
