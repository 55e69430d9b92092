"""Finding the sites of a model, and what follows each of them, from the graph of one small pass.

The graph is the same whether a model is written with modules or with functions, and it needs no tracing.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradguess.errors import InputError
from gradguess.layers.elementwise import gate_of
from gradguess.layers.entry import Gate, GradientRule
from gradguess.layers.positions import pattern_of
from gradguess.layers.table import gradient_of, is_matrix
from gradguess.model.autograd_graph import AutogradGraph
from gradguess.model.bottlenecks import bottleneck_calls
from gradguess.model.branches import branch_calls
from gradguess.model.cut_pass import Call, CutPass, Want, candidates, watched_run
from gradguess.model.hooks import CallHooks
from gradguess.model.severed import pulls_back, severed_leaves
from gradguess.model.side_effects import untouched
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
        want = _among(bottleneck_calls(probe, sites)) if isinstance(sites, int) else _wanted(task.model, sites)
    cut, stochastic, mutates = _cut(probe, want)
    if sliceable and len(cut.losses) != probe.batch:  # time first: two losses of two samples, not of two rows
        return lay_out(task, sites, full_batch=True, beyond_graph=beyond_graph)
    if not cut.calls:
        raise InputError(_no_site_message(sites))
    if not beyond_graph:
        check_differentiable(cut.losses)
    if sites in ("auto", "branch"):
        chosen = branch_calls(cut, severed_leaves(probe, cut) if beyond_graph else set())
        if chosen:
            cut, _, _ = _cut(probe, _among(chosen))
    severed = severed_leaves(probe, cut) if beyond_graph else None
    found = _read(task.model, cut, shapes, severed, sliceable=sliceable, stochastic=stochastic, mutates=mutates)
    return replace(found, sample_size=probe.sample_size) if sliceable else found


def _cut(task: Task, want: Want | None) -> tuple[CutPass, bool, bool]:
    """A cut pass that starts where a step does; whether it drew random numbers, and whether it wrote buffers."""
    with untouched(task.model) as traces:
        return CutPass(task, want), *traces()


def _among(chosen: set[tuple[nn.Module, int]]) -> Want:
    return lambda module, index: (module, index) in chosen


Shapes = dict[tuple[nn.Module, int], list[torch.Size | None]]  # of the tensors that each call returned


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
        with CallHooks(list(task.model.modules()), note):
            sliceable = watched_run(fewer, grad=False)[1].shape[0] == max(1, rows - 1)
    except Exception:
        sliceable = False
    if not sliceable:
        return task, False, {}
    return task.part(slice(rows), batch), True, shapes if rows > 1 else {}


def _wanted(model: nn.Module, sites: str | Sequence[str]) -> Want | None:
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
    return lambda module, index: module in chosen


def _no_site_message(sites: Sites) -> str:
    if isinstance(sites, str | int):
        return (
            "No module with trainable parameters was called in the forward pass, so there is no site. Call layers "
            "as modules (self.fc(x), not F.linear(x, self.fc.weight)), name containers with sites=[...], or use "
            "gg.WeightPerturbation(), which needs no sites."
        )
    return f"None of the modules {list(sites)} was called in the forward pass, or none gave a differentiable tensor."


def _read(model: nn.Module, cut: CutPass, shapes: Shapes, severed: set[int] | None, **facts: bool) -> Layout:
    """Turn the cut graph, and what else is known, into a layout. `severed` is None where it is not looked for."""
    parameters = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    roots = {(call, slot): s for call in cut.calls for slot, (s, _) in call.slots.items()}
    graph, at_output = AutogradGraph([cut.losses, *roots.values()]), AutogradGraph.leaves(cut.losses)
    reach = dict(zip(roots, cut.reach.values(), strict=True))
    reached = cut.reached(severed or ())
    used = [(call, slot) for call, slot in roots if id(call.slots[slot][1]) in reached]  # the loss depends on these
    title = {(call, slot): _title(call, slot, used) for call, slot in used}
    nodes = graph.leaf_nodes()
    rules = _rules([call.module for call, _ in used], graph, nodes, cut.altered)
    found = []
    for call, slot in used:
        s, leaf = call.slots[slot]
        above, reaches_output = [key for key in used if id(leaf) in reach[key]], id(leaf) in at_output
        if severed is not None and not pulls_back(
            [*(roots[key] for key in above), *[cut.losses] * reaches_output], leaf
        ):
            above, reaches_output = [], False
        gate, end = _follower(graph, nodes.get(id(leaf)))  # no node: nothing above records a graph
        fewer = shapes.get((call.module, call.index), [])
        batch_dim = _batch_dim(s, cut.losses.shape[0], fewer[slot] if slot < len(fewer) else None)
        plain = s.dim() == 2 and batch_dim == 0 and id(leaf) not in at_output
        below = {key: name for key, name in parameters.items() if key in reach[call, slot]}
        own = {id(p) for p in call.module.parameters(recurse=False) if p.requires_grad}
        found.append(
            Site(
                name=title[call, slot],
                module=call.module,
                call=call.index,
                slot=slot,
                batch_dim=batch_dim,
                gate=gate,
                above=tuple(title[key] for key in above),
                reaches_output=reaches_output,
                is_output=gate is None and len(cut.ends) == 1 and end is not None and cut.ends[0].grad_fn is end,
                linear=_linear_above(above, end, graph, cut.altered) if plain else None,
                parameters=tuple(below.values()),
                gradient=rules.get(call.module) if below and below.keys() == own else None,
                pattern=pattern_of(call.module, s, batch_dim, cut.ends),
                shape=tuple(s.shape[1:]),
            )
        )
    tail = tuple(name for key, name in parameters.items() if key in at_output)
    trained = set(tail).union(*(site.parameters for site in found))
    return Layout(
        sites=tuple(found),
        tail=tail,
        reached=tuple(name for name in parameters.values() if name in trained),
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
        watched_run(task, grad=False)
        stochastic, mutates = traces()
    return Layout((), (), (), False, stochastic, mutates, Members(task.model), {})


def _title(call: Call, slot: int, used: Sequence[tuple[Call, int]]) -> str:
    """The module's name; `#1` for its second call; `[2]` for a further tensor that the call returned."""
    name = call.name or type(call.module).__name__
    name += f"#{call.index}" if call.index else ""
    return name if slot == min(s for c, s in used if c is call) else f"{name}[{slot}]"


def _batch_dim(s: Tensor, batch: int, fewer: torch.Size | None) -> int | None:
    """The dimension of the batch: it has the size of the batch, and shrinks in `fewer`, the shape on fewer samples."""
    dims = [dim for dim in (0, 1) if dim < s.dim() and s.shape[dim] == batch]
    if fewer is not None and len(fewer) == s.dim():
        dims = [dim for dim in dims if fewer[dim] != s.shape[dim]]
    return dims[0] if dims else None


def _follower(graph: AutogradGraph, leaf: Any) -> tuple[Gate | None, Any]:
    """The gate of a site, and the node through which the rest of the graph sees the site."""
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


def _linear_above(
    above: Sequence[tuple[Call, int]], end: Any, graph: AutogradGraph, altered: set[nn.Module]
) -> nn.Linear | None:
    """The linear layer above, if all paths are elementwise -> that layer and nothing else."""
    if len(above) != 1 or len(graph.consumers.get(end, [])) != 1:
        return None
    call = above[0][0]
    plain = is_matrix(call.module) and isinstance(call.x, Tensor) and call.x.dim() == 2
    plain = plain and call.module not in altered
    return call.module if plain and call.x.grad_fn is end else None  # type: ignore[return-value]


def _rules(
    called: Sequence[nn.Module], graph: AutogradGraph, nodes: dict[int, Any], altered: set[nn.Module]
) -> dict[nn.Module, GradientRule]:
    """The closed forms of the layers whose parameters nothing else uses than calls of such layers."""
    closed = [module for module in called if gradient_of(module) is not None and module not in altered]
    uses = Counter(id(p) for module in closed for p in module.parameters(recurse=False))
    return {
        module: rule
        for module in closed
        if (rule := gradient_of(module)) is not None
        and all(
            len(graph.consumers.get(nodes.get(id(p)), [])) == uses[id(p)]
            for p in module.parameters(recurse=False)
            if p.requires_grad
        )
    }
