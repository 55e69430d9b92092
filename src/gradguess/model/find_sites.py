"""Finding the sites of a model, and what follows each of them, from the graph of one small pass.

The graph is the same whether a model is written with modules or with functions, and it needs no tracing.
"""

from __future__ import annotations

import difflib
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradguess.errors import InputError
from gradguess.layers.elementwise import gate_of
from gradguess.layers.entry import Gate, Layer
from gradguess.layers.positions import pattern_of
from gradguess.layers.table import closed_form, is_matrix
from gradguess.model.cut_pass import (
    CallKey,
    Cut,
    CutPass,
    branch_calls,
    candidates,
    leaves_below,
    nodes_below,
    piece_calls,
    severed_leaves,
)
from gradguess.model.hooks import call_hooks, untouched
from gradguess.model.site import Layout, Members, Site, Sites
from gradguess.model.task import Task, check_differentiable, check_plain, check_trainable

PROBE = 3  # samples in the pass that finds the sites


def lay_out(task: Task, sites: Sites = "auto", *, full_batch: bool = False, beyond_graph: bool = False) -> Layout:
    """Find the sites of `task.model` from a cut graph on a few samples. Leaves no trace in the model.

    With `full_batch` all samples are used: for models whose calls depend on all of them. With `beyond_graph` the sites
    below an operation that records no graph are found as well: tops, since nothing is known of what lies above.
    """
    check_trainable(task.model)
    check_plain(task.model)
    with untouched(task.model):
        probe, sliceable, shapes = (task, False, {}) if full_batch else _probe(task)
    with untouched(task.model):
        chosen = piece_calls(probe, sites) if isinstance(sites, int) else _named(task.model, sites)
    cut, stochastic, mutates = _cut(probe, chosen)
    if sliceable and len(cut.losses) != probe.batch:  # time first: two losses of two samples, not of two rows
        return lay_out(task, sites, full_batch=True, beyond_graph=beyond_graph)
    if not cut.cuts:
        raise InputError(_no_site_message(sites))
    if not beyond_graph:
        check_differentiable(cut.losses)
    if sites in ("auto", "branch"):
        branches = branch_calls(cut, severed_leaves(probe, cut) if beyond_graph else set())
        if branches:
            cut, stochastic, mutates = _cut(probe, branches)
    severed = severed_leaves(probe, cut) if beyond_graph else None
    sample_size = probe.sample_size if sliceable else 0
    facts = {"sliceable": sliceable, "stochastic": stochastic, "mutates": mutates, "sample_size": sample_size}
    return _read(task.model, cut, shapes, severed, **facts)


def _cut(task: Task, chosen: Collection[nn.Module | CallKey] | None) -> tuple[CutPass, bool, bool]:
    """A cut pass that starts where a step does; whether it drew random numbers, and whether it wrote buffers."""
    with untouched(task.model) as traces:
        return CutPass(task, chosen), *traces()


Shapes = dict[CallKey, list[torch.Size | None]]  # of the tensors that each call returned


def _probe(task: Task) -> tuple[Task, bool, Shapes]:
    """A few samples of the task if it can be cut along the first dimension, else all of it.

    Also the shapes that its modules return on fewer samples: the dimension that changes is the batch.
    """
    found = [t for t in tree_leaves(task.inputs) if isinstance(t, Tensor) and t.dim() > 0]
    batch = found[0].shape[0] if found else 0
    if batch == 0:
        return task, False, {}
    rows = min(PROBE, batch)
    fewer = task.part(slice(max(1, rows - 1)), batch)
    shapes: Shapes = {}

    def note(module: nn.Module, call: int, x: Any, output: Any) -> Any:
        leaves = tree_leaves(output)
        shapes[module, call] = [leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves]
        return output

    try:
        with call_hooks(task.model.modules(), note):
            sliceable = fewer.run(grad=False)[1].shape[0] == max(1, rows - 1)
    except Exception:
        sliceable = False
    if not sliceable:
        return task, False, {}
    return task.part(slice(rows), batch), True, shapes if rows > 1 else {}


def _named(model: nn.Module, sites: str | Sequence[str]) -> set[nn.Module] | None:
    """The modules that the caller named; None where no names are given."""
    if isinstance(sites, str):
        if sites not in ("auto", "leaf", "branch"):
            raise InputError(
                f"sites: expected 'auto', 'leaf', 'branch', a number or a list of module names, found {sites!r}. "
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
    return chosen


def _no_site_message(sites: Sites) -> str:
    if isinstance(sites, str | int):
        return (
            "No module with trainable parameters was called in the forward pass, so there is no site. Call layers "
            "as modules (self.fc(x), not F.linear(x, self.fc.weight)), name containers with sites=[...], or use "
            "gg.WeightPerturbation(), which needs no sites."
        )
    return f"None of the modules {list(sites)} was called in the forward pass, or none gave a differentiable tensor."


def _read(model: nn.Module, cut: CutPass, shapes: Shapes, severed: set[int] | None, **facts: Any) -> Layout:
    """Turn the cut graph, and what else is known, into a layout. `severed` is None where it is not looked for."""
    parameters = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    graph, at_output = _Graph([cut.losses, *(one.s for one in cut.cuts)]), leaves_below(cut.losses)
    reached = cut.reached(severed or ())
    used = [one for one in cut.cuts if id(one.leaf) in reached]  # the loss depends on these
    title = {one: _title(one, used) for one in used}
    rules = _rules(used, graph, cut.altered)
    found = []
    for one in used:
        s, key = one.s, id(one.leaf)
        above, reaches_output = [other for other in used if key in other.below], key in at_output
        if severed is not None and not _pulls_back(
            [*(other.s for other in above), *[cut.losses] * reaches_output], one.leaf
        ):
            above, reaches_output = [], False
        gate, end = _gate_above(one.leaf, graph)
        fewer = shapes.get(one.call, [])
        batch_dim = _batch_dim(s, cut.losses.shape[0], fewer[one.slot] if one.slot < len(fewer) else None)
        plain = s.dim() == 2 and batch_dim == 0 and key not in at_output
        below = {p: name for p, name in parameters.items() if p in one.below}
        own = {id(p) for p in one.module.parameters(recurse=False) if p.requires_grad}
        found.append(
            Site(
                name=title[one],
                module=one.module,
                call=one.index,
                slot=one.slot,
                batch_dim=batch_dim,
                gate=gate,
                above=tuple(title[other] for other in above),
                reaches_output=reaches_output,
                is_output=gate is None and len(cut.ends) == 1 and end is not None and cut.ends[0].grad_fn is end,
                linear=_linear_above(above, end, graph, cut.altered) if plain else None,
                parameters=tuple(below.values()),
                gradient=rules.get(one.module) if below and below.keys() == own else None,
                pattern=pattern_of(one.module, s, batch_dim, cut.ends),
                shape=tuple(s.shape[1:]),
            )
        )
    tail = tuple(name for key, name in parameters.items() if key in at_output)
    return Layout(
        sites=tuple(found),
        tail=tail,
        members=Members(model),
        calls=cut.counts,
        idle=tuple(module for _, module in candidates(model, False) if module not in cut.counts),
        outputs=cut.outputs,
        **facts,
    )


def bare_layout(task: Task) -> Layout:
    """No sites: for methods that need none."""
    check_trainable(task.model)
    with untouched(task.model) as traces:
        task.run(grad=False)
        stochastic, mutates = traces()
    return Layout((), (), False, stochastic, mutates, Members(task.model), {})


def _title(one: Cut, used: Sequence[Cut]) -> str:
    """The module's name; `#1` for its second call; `[2]` for a further tensor that the call returned."""
    name = one.name or type(one.module).__name__
    name += f"#{one.index}" if one.index else ""
    return name if one.slot == min(other.slot for other in used if other.call == one.call) else f"{name}[{one.slot}]"


def _batch_dim(s: Tensor, batch: int, fewer: torch.Size | None) -> int | None:
    """The dimension of the batch: it has the size of the batch, and shrinks in `fewer`, the shape on fewer samples."""
    dims = [dim for dim in (0, 1) if dim < s.dim() and s.shape[dim] == batch]
    if fewer is not None and len(fewer) == s.dim():
        dims = [dim for dim in dims if fewer[dim] != s.shape[dim]]
    return dims[0] if dims else None


def _pulls_back(ends: list[Tensor], leaf: Tensor) -> bool:
    """Whether reverse mode leads from `ends` to `leaf`. Quantised layers, say, record a graph that cannot be used."""
    try:
        with warnings.catch_warnings(action="ignore"):  # PyTorch warns where an operation is not differentiable
            return torch.autograd.grad(ends, leaf, ends, retain_graph=True, allow_unused=True)[0] is not None
    except (RuntimeError, NotImplementedError):
        return False


class _Graph:
    """The autograd graph below some tensors: which nodes use a node; the nodes of leaves, by the leaf's `id`."""

    def __init__(self, roots: Sequence[Tensor]) -> None:
        nodes = nodes_below(root.grad_fn for root in roots)
        self.leaves = {id(node.variable): node for node in nodes if hasattr(node, "variable")}
        self._users: dict[Any, list[Any]] = {}
        for node in nodes:
            for below, _ in node.next_functions:
                if below is not None:
                    self._users.setdefault(below, []).append(node)

    def users(self, node: Any) -> list[Any]:
        """The nodes that use `node`, once for each use."""
        return self._users.get(node, [])


def _gate_above(leaf: Tensor, graph: _Graph) -> tuple[Gate | None, Any]:
    """The gate of a site, and the node through which the rest of the graph sees the site."""
    for copy in graph.users(graph.leaves.get(id(leaf))):  # that of the cut; none where nothing above records a graph
        users = graph.users(copy)
        gate = gate_of(users[0]) if len(users) == 1 else None
        return gate, copy if gate is None else users[0]
    return None, None


def _linear_above(above: Sequence[Cut], end: Any, graph: _Graph, altered: set[nn.Module]) -> nn.Linear | None:
    """The linear layer above, if all paths are elementwise -> that layer and nothing else."""
    if len(above) != 1 or len(graph.users(end)) != 1:
        return None
    module, x = above[0].module, above[0].x
    plain = is_matrix(module) and module not in altered and isinstance(x, Tensor) and x.dim() == 2
    return module if plain and x.grad_fn is end else None  # type: ignore[return-value]


def _rules(used: Sequence[Cut], graph: _Graph, altered: set[nn.Module]) -> dict[nn.Module, Layer]:
    """The closed forms of the layers whose parameters nothing else uses than calls of such layers."""
    closed = [(one.module, rule) for one in used if (rule := closed_form(one.module)) and one.module not in altered]
    uses = Counter(id(p) for module, _ in closed for p in module.parameters(recurse=False))
    return {
        module: rule
        for module, rule in closed
        if all(
            len(graph.users(graph.leaves.get(id(p)))) == uses[id(p)]
            for p in module.parameters(recurse=False)
            if p.requires_grad
        )
    }
