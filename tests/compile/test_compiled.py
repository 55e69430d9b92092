"""A compiled step against the same step uncompiled: the same noise, gradients, state, buffers and random state.

Most tests stop at the graph, which is exact and quick; one goes through the compiler.
"""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import gradguess as gg
from gradguess.compile import compiler
from models import ZOO, Calls, Net, make
from traced_graphs import as_compiled

LOSS = nn.CrossEntropyLoss(reduction="none")
METHODS = {
    "weight": gg.WeightPerturbation(),
    "activation": gg.ActivationPerturbation(),
    "wt": gg.WTranspose(),
    "subspace": gg.WPerp(k=2, solver="subspace", refresh=3),
    "wperp": gg.WPerp(k=3),
    "wp": gg.WPreconditioned(),
    "backprop": gg.Backprop(),
    "direct": gg.Feedback(gg.WPerp(k=3), form="direct"),
    "chained": gg.Feedback(gg.WPerp(k=3)),
    "corrected": gg.Feedback(gg.WPerp(k=3), form="corrected"),
    "rare": gg.Feedback(gg.WPerp(k=3), every=2),
    "students": gg.Students(),
}


@pytest.fixture
def graphs_alone(monkeypatch):
    """The traced graph is run as it is."""
    monkeypatch.setattr(compiler, "compiled", as_compiled)


class Attention(nn.Module):
    """Tokens, attention with dropout or with masks, norms, and additions."""

    def __init__(self, dropout: float = 0.1, mask: str = "") -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.tokens, self.head, self.mask = nn.Embedding(7, 8), nn.Linear(8, 5), mask
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=torch.float64)
        masks = {
            "causal": {"mask": causal, "is_causal": True},
            "padding": {"src_key_padding_mask": x == 3},
        }
        return self.head(self.blocks(self.tokens(x), **masks.get(self.mask, {})).mean(1))


def recurrent() -> nn.Module:
    """Two layers of an LSTM with dropout between them, batch first."""
    layers = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True)
    parts = {"stem": nn.Linear(5, 6), "layers": layers, "head": nn.Linear(6, 5)}
    return Net(lambda m, x: m.head(m.layers(torch.relu(m.stem(x)))[0][:, -1]), **parts)


class Counted(nn.Module):
    """A batch norm that is called twice, and buffers of whole numbers and of bools that the model writes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(8, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x)).relu()
        self.calls += 1
        self.seen |= (h > 1).any(0)
        return self.c(self.norm(self.b(h)).relu())


def written() -> nn.Module:
    """Writes to a part of what a layer gave."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        first = m.layers[0](x)
        first[:, 1:].add_(1.0)
        first = torch.relu(first)
        second = m.layers[1](first)
        second[:, 1:].add_(first[:, :-1])
        return m.layers[2](second)

    return Net(run, layers=nn.ModuleList([nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 5)]))


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 1, 8, 8, dtype=torch.float64), torch.randint(0, 5, (6,))


def networks() -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    torch.manual_seed(0)
    x, t = torch.randn(16, 12, dtype=torch.float64), torch.randint(0, 5, (16,))
    mlp = [nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(24, 5)]
    norm = [nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False)]
    norm += [nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)]
    conv = [nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()]
    found = {
        "chain": (nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 5)), x, t),
        "dropout": (nn.Sequential(*mlp), x, t),
        "convolutions": (nn.Sequential(*conv, nn.Linear(128, 5)), *images()),
        "batch norm": (nn.Sequential(*norm), *images()),
        "attention": (Attention(), torch.randint(0, 7, (6, 9)), torch.randint(0, 5, (6,))),
        "counted": (Counted(), x, t),
        "written": (written(), x, t),
        "recurrent": (recurrent(), torch.randn(6, 4, 5, dtype=torch.float64), torch.randint(0, 5, (6,))),
    }
    for mask in ("", "causal", "padding"):  # few queries: plain operations in the graph
        found[f"attention, {mask}"] = (Attention(0.0, mask), *found["attention"][1:])
    return {name: (model.double(), inputs, targets) for name, (model, inputs, targets) in found.items()}


def trained(model: nn.Module, method, x, t, steps: int = 4, **options) -> dict[str, Tensor]:
    """Everything that a few steps leave behind."""
    model = copy.deepcopy(model)
    torch.manual_seed(3)
    forward = gg.ForwardGradient(model, method, seed=1, **options)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    left = {}
    for step in range(steps):
        optimiser.zero_grad()
        left[f"loss {step}"] = forward(LOSS, x, t)
        optimiser.step()
    if options.get("compile"):
        runner = forward.plan.runner
        assert not runner.refused
        assert runner._graphs
    left |= {f"state {name}": value.double() for name, value in forward.state_dict().items()}
    left |= {name: value.double() for name, value in model.state_dict().items()}
    return left | {"random state": torch.get_rng_state().double()}


PAIRS = [("chain", method) for method in METHODS if method != "students"]
PAIRS += [("counted", method) for method in ("weight", "chained")]
PAIRS += [("written", method) for method in ("wperp", "direct", "chained", "corrected")]
PAIRS += [("recurrent", method) for method in ("wperp", "backprop", "students")]
PAIRS += [
    (network, method)
    for network in ("dropout", "convolutions", "batch norm", "attention")
    for method in (("chained",) if network == "attention" else ("weight", "wt", "wperp", "chained"))
]
PAIRS += [(f"attention, {mask}", method) for mask in ("", "causal", "padding") for method in ("wperp", "chained")]


@pytest.mark.parametrize(("network", "method"), PAIRS)
def test_the_graph_makes_the_same_steps(network, method, graphs_alone):
    model, x, t = networks()[network]
    options = (
        {"coupling": "batch"} if network in ("batch norm", "counted") else {"sites": 2} if method == "students" else {}
    )
    plain = trained(model, METHODS[method], x, t, **options)
    graph = trained(model, METHODS[method], x, t, compile=True, **options)
    assert plain.keys() == graph.keys()
    for name, value in plain.items():
        torch.testing.assert_close(graph[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    "options", [{"tangents": 3}, {"isolate": True}, {"balance": True}, {"sites": "leaf"}, {"top": "exact"}], ids=str
)
def test_options_are_in_the_graph(options, graphs_alone):
    model, x, t = networks()["attention, causal"]
    plain, graph = (trained(model, gg.WPerp(k=3), x, t, compile=on, **options) for on in (False, True))
    for name, value in plain.items():
        torch.testing.assert_close(graph[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


def test_recurrent_layers_for_which_the_cpu_has_a_kernel_are_compiled(graphs_alone):
    """In float32 alone; a trace cannot see through it, so that the graph holds plain operations."""
    torch.manual_seed(0)
    model, x, t = recurrent(), torch.randn(6, 4, 5), torch.randint(0, 5, (6,))
    plain, graph = (trained(model, gg.Students(), x, t, sites=2, compile=on) for on in (False, True))
    for name, value in plain.items():
        torch.testing.assert_close(graph[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    ("what", "error", "said"),
    [
        ("gradguess.compile.trace._merged", RuntimeError("in PyTorch"), "RuntimeError: in PyTorch"),
        ("torch._inductor.compile", FileNotFoundError("gcc\nmore"), "FileNotFoundError: gcc Steps run"),
    ],
)
def test_whatever_fails_in_a_trace_leaves_the_step_uncompiled(what, error, said, monkeypatch):
    def fails(*arguments):
        raise error

    monkeypatch.setattr(what, fails)
    model, x, t = networks()["chain"]
    forward = gg.ForwardGradient(model, gg.WPerp(k=3), compile=True)
    forward(LOSS, x, t)
    with pytest.warns(UserWarning, match=said) as seen:
        forward(LOSS, x, t)
    assert seen[0].filename == __file__  # it points at the caller
    assert forward.plan.runner.refused


@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_an_error_of_the_loss_is_the_callers_and_refuses_nothing(error, graphs_alone, monkeypatch):
    def fails(*args, **options):
        raise error("no")

    model, x, t = networks()["chain"]
    forward = gg.ForwardGradient(model, gg.WPerp(k=3), compile=True)
    forward(LOSS, x, t)
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "cross_entropy", fails)
        with pytest.raises(error, match="no"):
            forward(LOSS, x, t)  # a warning would be an error
    forward(LOSS, x, t)
    assert forward.plan.runner._graphs


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_memory_that_runs_out_in_the_compiler_is_no_reason_to_refuse(error, monkeypatch):
    from torch._inductor.exc import InductorError

    def fails(graph, arguments):
        raise InductorError(error("out of memory"), None)

    monkeypatch.setattr("torch._inductor.compile", fails)
    model, x, t = networks()["chain"]
    forward = gg.ForwardGradient(model, gg.WPerp(k=3), compile=True)
    forward(LOSS, x, t)
    with pytest.raises(error, match=r"^out of memory"):
        forward(LOSS, x, t)
    assert not forward.plan.runner.refused


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_the_zoo(name, graphs_alone):
    """Every model of the zoo is traced, and gives the same gradients."""
    case = make(name)
    found = []
    for compile in (False, True):
        model = copy.deepcopy(case.model)
        torch.manual_seed(0)
        forward = gg.ForwardGradient(model, gg.WPerp(k=3), compile=compile)
        for _ in range(3):
            model.zero_grad()
            forward(case.loss_fn, case.inputs, case.targets)  # a warning would be an error
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for parameter, grad in found[0].items():
        torch.testing.assert_close(found[1][parameter], grad, rtol=1e-8, atol=1e-10)


def test_autocast(graphs_alone):
    """The casts are in the graph; it is not cast a second time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    x, t = torch.randn(8, 6), torch.randint(0, 4, (8,))
    found = []
    for compile in (False, True):
        forward = gg.ForwardGradient(model, gg.WPerp(k=3), compile=compile)
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(4):
                model.zero_grad()
                forward(LOSS, x, t)
        found.append(model[0].weight.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)


def test_shapes_strides_dtypes_and_modes_are_looked_at(graphs_alone):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))
    x, t = torch.randn(8, 3, 4), torch.randint(0, 4, (8,))
    forward = gg.ForwardGradient(model, gg.WTranspose(), compile=True)
    for batch in (x, x, x, torch.randn(8, 4, 3).mT, torch.randn(8, 4, 3).mT, x[:5], x[:5], x):
        forward(LOSS, batch, t[: len(batch)])
    model[1].weight.data = model[1].weight.data.t().contiguous().t()
    for _ in range(3):
        forward(LOSS, x, t)
    assert len(forward.plan.runner._graphs) == 4
    model.eval()
    for _ in range(2):
        forward(LOSS, x, t)
    assert len(forward.plan.runner._graphs) == 5
    model.double()
    for _ in range(3):
        loss = forward(LOSS, x.double(), t)
    assert loss.dtype == torch.float64


SEQUENCE_FIRST = nn.Sequential(  # whose strides the compiler changes
    Calls(lambda x: x.unflatten(1, (2, 4)).transpose(0, 1)),
    nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
    Calls(lambda x: x.transpose(0, 1).flatten(1)),
)


@pytest.mark.slow
@pytest.mark.parametrize(("between", "tangents"), [(nn.ReLU(), 1), (nn.LayerNorm(8), 2), (SEQUENCE_FIRST, 1)])
def test_fused_kernels_make_the_same_steps(between, tangents):
    """Through the compiler, in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), between, nn.Linear(8, 3))
    x, t = torch.randn(10, 6), torch.randint(0, 3, (10,))
    plain, fused = (
        trained(model, gg.WPerp(k=2), x, t, compile=compile, tangents=tangents) for compile in (False, True)
    )
    for name, value in plain.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


class Block(nn.Module):
    """Three layers and a norm; what is done between them is given."""

    def __init__(self, between) -> None:
        super().__init__()
        self.a, self.n, self.b, self.c = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.between, self.numbers, self.flag = between, [1.0], torch.tensor(True)
        self.average = nn.BatchNorm1d(6, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.between(self, self.b(self.n(self.a(x))), x))


def add_in_place(model: Block, h: Tensor, x: Tensor) -> Tensor:
    h += x
    return h.tanh_()


def scale_by_a_count(model: Block, h: Tensor, x: Tensor) -> Tensor:
    return h * (x > 0).nonzero().shape[0]


def scale_by_a_length(model: Block, h: Tensor, x: Tensor) -> Tensor:
    return h * x[x > 0].numel()


def look_at_a_flag(model: Block, h: Tensor, x: Tensor) -> Tensor:
    return h.tanh() if model.flag else h


def look_at_a_draw(model: Block, h: Tensor, x: Tensor) -> Tensor:
    drawn = torch.rand((), generator=torch.Generator().manual_seed(len(model.numbers)))
    return h.tanh() if drawn.item() < 0.5 else h


def drawn_by_its_own(model: Block, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.rand(6, generator=torch.Generator().manual_seed(0), dtype=h.dtype)


def product_with_a_vector(model: Block, h: Tensor, x: Tensor) -> Tensor:
    return h + torch.nn.functional.linear(torch.stack([h, x], 1), model.n.weight + 1).sum(-1, keepdim=True)


def drop(model: Block, h: Tensor, x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(h, 0.4)


def drop_in_a_checkpoint(model: Block, h: Tensor, x: Tensor) -> Tensor:
    """Masks are drawn twice: in the pass, and where the block is computed again."""
    h = torch.utils.checkpoint.checkpoint(lambda s: drop(model, s.tanh(), x), drop(model, h, x), use_reentrant=False)
    return drop(model, h, x)


def look_at_the_batch(model: Block, h: Tensor, x: Tensor) -> Tensor:
    return h.tanh() if torch.zeros(1, dtype=x.dtype).add_(x.sum()).item() > 0 else h


def look_at_positions(model: Block, h: Tensor, x: Tensor) -> Tensor:
    positions = torch.arange(6, dtype=x.dtype)
    return h + positions if (positions.diff() == 1).all() else h


def average_of_all_steps(model: Block, h: Tensor, x: Tensor) -> Tensor:
    return model.average(h)


def randomly_leaky(model: Block, h: Tensor, x: Tensor) -> Tensor:
    return torch.nn.functional.rrelu(h, training=True)


def coins(model: Block, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.bernoulli(torch.full_like(h, 0.5))


@pytest.mark.parametrize(
    ("between", "method", "refused"),
    [
        (add_in_place, gg.Feedback(gg.WPerp(k=3)), None),
        (add_in_place, gg.WPerp(k=3), None),
        (product_with_a_vector, gg.WPerp(k=3), None),
        (scale_by_a_count, gg.WPerp(k=3), "shape of a tensor"),
        (scale_by_a_length, gg.WPerp(k=3), "shape of a tensor"),
        (look_at_a_flag, gg.WPerp(k=3), "looks at numbers"),
        (look_at_a_draw, gg.WPerp(k=3), "looks at numbers"),
        (drawn_by_its_own, gg.WPerp(k=3), "tensors are not"),
        (drop, gg.Feedback(gg.WPerp(k=3), fraction=0.5), "a pass aside"),
        (drop_in_a_checkpoint, gg.Backprop(), None),
        (look_at_the_batch, gg.WPerp(k=3), "looks at numbers"),
        (look_at_positions, gg.WPerp(k=3), None),
        (average_of_all_steps, gg.WPerp(k=3), "looks at numbers"),
        (randomly_leaky, gg.WPerp(k=3), "random numbers by aten"),
        (coins, gg.WPerp(k=3), "random numbers by aten"),
    ],
)
def test_what_changes_from_step_to_step(between, method, refused, graphs_alone):
    """Other batches, and numbers of the model that its user changes: a graph follows, or steps run uncompiled."""
    found, said = [], []
    for compile in (False, True):
        torch.manual_seed(0)
        model = Block(between).double()
        forward = gg.ForwardGradient(model, method, compile=compile)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(6):
            if step == 4:
                model.numbers += [3.0]
                model.flag.fill_(False)
            optimiser.zero_grad()
            x, t = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 4, (8,))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                forward(LOSS, x, t)
            said += [str(one.message) for one in caught if "compile=True" in str(one.message)]
            optimiser.step()
        found.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)
    assert len(said) == (refused is not None)
    assert refused is None or refused in said[0]


def test_a_backward_hook_that_comes_later_is_seen(graphs_alone):
    found = []
    for compile in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        forward = gg.ForwardGradient(model, gg.Backprop(), compile=compile)
        for step in range(6):
            if step in (3, 5):
                model[1].register_full_backward_hook(lambda module, below, above: (3 * below[0],))
            model.zero_grad()
            forward(LOSS, torch.ones(5, 6, dtype=torch.float64), torch.arange(5) % 4)
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0])


def test_a_trace_keeps_nothing_of_the_step_that_it_followed(graphs_alone):
    """Reverse graphs of a trace and what notes its tensors held each other, and all that a step computes."""

    def alive() -> int:
        gc.collect()
        found = [o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values())

    model, x, t = networks()["attention"]
    forward = gg.ForwardGradient(model, gg.WPerp(k=3), compile=True)
    sizes = []
    for _ in range(3):
        forward(LOSS, x, t)
        sizes.append(alive())
    assert forward.plan.runner._graphs
    assert sizes[2] <= sizes[0] + 2**10


def pair() -> nn.Module:
    """Two inputs."""
    parts = {"a": nn.Linear(5, 6), "b": nn.Linear(5, 6), "c": nn.Linear(6, 5)}
    return Net(lambda m, x, y: m.c(torch.tanh(m.a(x)) * m.b(y)), **parts)


def test_one_tensor_given_twice_is_two_arguments():
    """The graph is made where both inputs are one tensor, and then sees two."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 6, 5, dtype=torch.float64)
    model, t, found = pair().double(), torch.arange(6) % 5, []
    for compile in (False, True):
        forward = gg.ForwardGradient(model, gg.WPerp(k=2), compile=compile)
        for inputs in ((x, x), (x, x), (x, y)):
            model.zero_grad()
            forward(LOSS, inputs, t)
        found.append([p.grad for p in model.parameters()])
    assert forward.plan.runner._graphs
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_a_module_with_two_names_keeps_its_parameters():
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    model.again = model[0]
    own, t = dict(model.named_parameters()), torch.arange(6) % 5
    forward = gg.ForwardGradient(model, gg.WPerp(k=2), compile=True)
    x = torch.randn(6, 5, dtype=torch.float64)
    # a Sequential would run the other name as well
    model.forward = lambda x: model[2](model[1](model[0](x)))
    for _ in range(3):
        forward(LOSS, x, t)
    assert forward.plan.runner._graphs
    assert all(p is own[name] for name, p in model.named_parameters())
