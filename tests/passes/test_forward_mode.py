"""PyTorch's forward mode under `gg.forward_mode()`: against central differences and the math backend, in float64."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial
from weakref import WeakSet

import pytest
import torch
import torch._dynamo.config
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jvp, linearize, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradguess as gg
from gradguess.layers import attention

T = 20  # positions: five blocks of queries, and more keys than plain operations are for
STEP = 1e-5


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 4)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Attention(nn.Module):
    """One projection for queries, keys and values, as in a GPT, a Llama or a DiT; `options` as those of PyTorch's."""

    def __init__(self, shared: int = 1, **options) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8 // shared), nn.Linear(8, 8 // shared)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2)


class Moving(Attention):
    """The mask depends on the input as well."""

    def forward(self, x: Tensor) -> Tensor:
        self.options = {"attn_mask": (x @ x.mT)[:, None]}
        return super().forward(x)


class Biased(Attention):
    """The mask is learned, and shared by the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4, T, T))

    def forward(self, x: Tensor) -> Tensor:
        self.options = {"attn_mask": self.bias}
        return super().forward(x)


class Picked(nn.Module):
    """A layer in another call."""

    def __init__(self, layer: nn.Module, run) -> None:
        super().__init__()
        self.layer, self.run = layer, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layer, x)


def itself(layer: nn.Module, x: Tensor, **options) -> Tensor:
    return layer(x, x, x, **options)[0]


PADDED = torch.arange(T)[None] >= torch.tensor([[T], [13]])  # True where there is no token
SEEN = noise(2, 1, T, T) > 0
SEEN[0, 0, 3] = False  # a query that sees nothing
MAKE = {
    "attention": Attention,
    "attention, causal": partial(Attention, is_causal=True),
    "attention, boolean mask": partial(Attention, attn_mask=SEEN),
    "attention, key padding": partial(Attention, attn_mask=~PADDED[:, None, None]),
    "attention, additive mask, scale": partial(Attention, attn_mask=noise(T, T), scale=0.3),
    "attention, shared heads (GQA)": partial(Attention, 2, enable_gqa=True, is_causal=True),
    "attention, a learned mask": Biased,
    "attention, a mask with a tangent": Moving,
    "MultiheadAttention": lambda: Picked(
        nn.MultiheadAttention(8, 2, batch_first=True), partial(itself, need_weights=False)
    ),
    "MultiheadAttention, key padding": lambda: Picked(
        nn.MultiheadAttention(8, 2, batch_first=True), partial(itself, key_padding_mask=PADDED, need_weights=False)
    ),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.gelu, batch_first=True),
    "TransformerEncoderLayer, eval()": lambda: nn.TransformerEncoderLayer(
        8, 2, 16, 0.1, F.silu, batch_first=True
    ).eval(),
    "TransformerDecoderLayer": lambda: Picked(
        nn.TransformerDecoderLayer(8, 2, 16, 0.0, torch.tanh), lambda layer, x: layer(x, 2 * x)
    ),
    "GRU": lambda: Picked(nn.GRU(8, 4, 2, bidirectional=True), lambda layer, x: layer(x)[0]),
    "LSTM": lambda: Picked(nn.LSTM(8, 4, batch_first=True), lambda layer, x: layer(x)[0]),
    "GRUCell": lambda: Picked(nn.GRUCell(8, 4), lambda layer, x: layer(x[0], layer(x[1]))),
    "LSTMCell": lambda: Picked(nn.LSTMCell(8, 4), lambda layer, x: layer(x[0], layer(x[1]))[0]),
    "LayerNorm, RMSNorm": lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8), nn.SiLU()),
    "GroupNorm": lambda: nn.Sequential(nn.Conv1d(T, 8, 3), nn.GELU(), nn.GroupNorm(2, 8), nn.Conv1d(8, 4, 3)),
    "BatchNorm, eval()": lambda: nn.Sequential(nn.Conv1d(T, 8, 3), nn.BatchNorm1d(8), nn.ReLU()).eval(),
}
GAPS = {
    ("attention, a mask with a tangent", "compiled jvp"): "so does PyTorch's math backend",
    (
        "attention, a mask with a tangent",
        "gradients, forward_ad",
    ): "PyTorch's softmax writes to what its gradient needs",
}
RECURRENT = ("GRU", "LSTM")  # `torch.compile` refuses them, if it is not allowed them


def made(name: str) -> nn.Module:
    """With weights of norms that are not one."""
    torch.manual_seed(0)
    model = MAKE[name]().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


X, DX = noise(2, T, 8), noise(2, T, 8, seed=1)


def central(function, x: Tensor = X, t: Tensor = DX) -> Tensor:
    """The derivative along `t` by central differences."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        return (function(x + STEP * t) - function(x - STEP * t)) / (2 * STEP)


def by_jvp(function):
    return jvp(function, (X,), (DX,))


def by_linearize(function):
    value, tangent = linearize(function, X)
    return value, tangent(DX)


def by_dual_numbers(function):
    with fwAD.dual_level():
        return tuple(fwAD.unpack_dual(function(fwAD.make_dual(X, DX))))


def compiled(function):
    def step(x, t):
        return jvp(function, (x,), (t,))

    torch._dynamo.reset()
    return torch.compile(step, fullgraph=True, backend="aot_eager")(X, DX)


def compiled_within(function):
    def step(x, t):
        with gg.forward_mode():
            return jvp(function, (x,), (t,))

    torch._dynamo.reset()
    return torch.compile(step, fullgraph=True, backend="aot_eager")(X, DX)


WAYS = [by_jvp, by_linearize, by_dual_numbers]
tracked = pytest.mark.parametrize("track", [True, False], ids=["tracked", "constant"])


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # PyTorch's `linearize`
@tracked
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MAKE)
def test_value_and_tangent(name, way, track):
    model = made(name)
    with torch.no_grad(), gg.forward_mode(track_tangent_grad=track):
        value, tangent = way(model)
    torch.testing.assert_close(value, model(X))
    torch.testing.assert_close(tangent, central(model), rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@tracked
@pytest.mark.parametrize("name", [name for name in MAKE if (name, "compiled jvp") not in GAPS])
def test_compiled(name, track):
    model = made(name)
    recurrent = torch._dynamo.config.patch(allow_rnn=name in RECURRENT)
    with gg.forward_mode(track_tangent_grad=track), recurrent:
        value, tangent = compiled(model)
    torch.testing.assert_close(value, model(X))
    torch.testing.assert_close(tangent, central(model), rtol=1e-6, atol=1e-8)
    assert_gradients(model, value, tangent, track)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention, causal", "TransformerEncoderLayer", "GRUCell"])
def test_a_context_inside_of_a_compiled_function(name):
    model = made(name)
    torch.testing.assert_close(compiled_within(model)[1], central(model), rtol=1e-6, atol=1e-8)


def assert_gradients(model: nn.Module, value: Tensor, tangent: Tensor, track: bool) -> None:
    """Gradients of a function of both, against central differences along a direction of all parameters."""
    assert tangent.requires_grad == track
    loss = value.square().sum() + (tangent.square().sum() if track else 0)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    own = dict(model.named_parameters())
    directions = {n: noise(*p.shape, seed=3) for n, p in own.items()}
    found = sum((g * d).sum() for g, d in zip(gradients, directions.values(), strict=True))

    def loss_at(size: float) -> Tensor:
        moved = {n: p.detach() + size * directions[n] for n, p in own.items()}
        run = partial(torch.func.functional_call, model, moved)
        value, tangent = by_jvp(run)
        return value.square().sum() + (tangent.square().sum() if track else 0)

    with torch.no_grad(), gg.forward_mode():  # whose tangents are right, as the tests above say
        wanted = (loss_at(STEP) - loss_at(-STEP)) / (2 * STEP)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@tracked
@pytest.mark.parametrize("way", [by_jvp, by_dual_numbers])
@pytest.mark.parametrize("name", MAKE)
def test_gradients(name, way, track):
    """Reverse over forward, through the value, and through the tangent where it is tracked."""
    if track and way == by_dual_numbers and (name, "gradients, forward_ad") in GAPS:
        pytest.skip(GAPS[name, "gradients, forward_ad"])
    model = made(name)
    with gg.forward_mode(track_tangent_grad=track):
        value, tangent = way(model)
    assert_gradients(model, value, tangent, track)


@pytest.mark.parametrize("way", WAYS[::2])
def test_a_kernel_of_value_and_tangent_takes_no_gradients_away(way, monkeypatch):
    """As on CUDA: what it makes is in no graph, and a graph outside of `jvp` does not show."""

    def kernel(q, k, v, tangents, mask, causal, scale):
        value = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)
        return value, plain(q, k, v, tangents, mask, causal, scale)[1]

    plain, model = attention.attention_tangent, made("attention, causal")
    monkeypatch.setattr(attention, "attention_tangent", kernel)
    with gg.forward_mode(track_tangent_grad=False):
        value, tangent = way(model)
    assert_gradients(model, value, tangent, False)


@pytest.mark.parametrize("name", [name for name in MAKE if not re.search("boolean|Norm|coder", name)])
def test_as_the_math_backend_does(name):
    """But for gradients of tangents that are wrong in PyTorch: of norms (pytorch#196700), and NaN where a query sees
    nothing.
    """
    model = made(name)
    results = []
    for context in (gg.forward_mode(), sdpa_kernel(SDPBackend.MATH)):
        with context:
            value, tangent = by_jvp(model)
        loss = value.square().sum() + tangent.square().sum()
        results.append((value, tangent, *torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(*results)


NESTED = {
    "jvp of jvp": lambda f: jvp(lambda x: jvp(f, (x,), (DX,))[1], (X,), (DX,))[1],
    "jvp of grad": lambda f: jvp(grad(lambda x: f(x).square().sum()), (X,), (DX,))[1],
    "grad of jvp": lambda f: grad(lambda x: jvp(f, (x,), (DX,))[1].square().sum())(X),
    "many tangents": lambda f: vmap(lambda t: jvp(f, (X,), (t,))[1])(torch.stack([DX, X])),
    "each sample": lambda f: vmap(lambda x, t: jvp(lambda x: f(x[None]), (x,), (t,))[1])(X, DX),
    "jvp of vmap": lambda f: jvp(vmap(lambda x: f(x[None])), (X,), (DX,))[1],
    "jacfwd": lambda f: jacfwd(lambda x: f(x)[0, :3])(X),
    "hessian": lambda f: hessian(lambda x: f(torch.cat([x, X[:, 1:]], 1)).square().sum())(X[:, :1]),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_transforms(name):
    """Other transforms around and within: none of them may see a constant where there is a tangent."""
    model = made("attention, causal")
    with sdpa_kernel(SDPBackend.MATH):
        wanted = NESTED[name](model)
    with gg.forward_mode():
        torch.testing.assert_close(NESTED[name](model), wanted)


def test_second_derivatives_through_a_norm():
    """PyTorch's own are wrong (pytorch#196700)."""
    model = made("LayerNorm, RMSNorm")
    with gg.forward_mode():
        found = NESTED["jvp of jvp"](model)
    torch.testing.assert_close(found, central(lambda x: jvp(model, (x,), (DX,))[1]), rtol=1e-6, atol=1e-7)


def test_a_derivative_of_a_constant_tangent_is_refused():
    model = made("attention, causal")
    with gg.forward_mode(track_tangent_grad=False):
        with pytest.raises(gg.InputError, match=r"torch.func.jvp is open around"):
            NESTED["jvp of jvp"](model)
        torch.testing.assert_close(NESTED["each sample"](model)[:, 0], by_jvp(model)[1])


def test_dropout_is_that_of_the_math_backend():
    model, results = Attention(dropout_p=0.5).double(), []
    for context in (gg.forward_mode(), sdpa_kernel(SDPBackend.MATH)):
        torch.manual_seed(1)
        with context:
            results.append(by_jvp(model))
    torch.testing.assert_close(*results)


@tracked
@pytest.mark.parametrize(
    "name",
    ["attention, causal", "attention, key padding", "TransformerEncoderLayer", *RECURRENT, "GRUCell", "GroupNorm"],
)
def test_autocast(name, track):
    model = MAKE[name]()
    with gg.forward_mode(track_tangent_grad=track):
        wanted = jvp(model, (X.float(),), (DX.float(),))
        with torch.autocast("cpu", torch.bfloat16):
            found = jvp(model, (X.float(),), (DX.float(),))
    for ours, full in zip(found, wanted, strict=True):
        assert ours.dtype == found[0].dtype
        assert (ours - full).norm() < 0.01 * full.norm()


class Saved:
    """A tensor that a graph keeps for its backward pass."""

    def __init__(self, t: Tensor) -> None:
        self.t = t


def kept(run) -> int:
    """Bytes that the graph of what `run` returns keeps. Tensors that share memory count once."""
    alive: WeakSet[Saved] = WeakSet()

    def pack(t: Tensor) -> Saved:
        one = Saved(t)
        alive.add(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.t):
        result = run()
    memory = [one.t.untyped_storage() for one in alive if not one.t._is_zerotensor()]
    size = sum({one.data_ptr(): one.nbytes() for one in memory}.values())
    del result
    return size


@pytest.mark.parametrize("way", [by_jvp, by_dual_numbers])
def test_constant_tangents_keep_nothing(way):
    """A graph beside them holds what that of a pass without tangents holds, and no matrix of all pairs."""
    model = made("TransformerEncoderLayer")
    plain = kept(lambda: model(X))
    with gg.forward_mode(track_tangent_grad=False):
        beside = kept(lambda: way(model))
    assert beside < 1.1 * plain
    with sdpa_kernel(SDPBackend.MATH):
        assert kept(lambda: by_jvp(model)) > 2.5 * plain


def test_gradients_of_tangents_hold_no_matrix_of_all_pairs():
    model = made("attention, causal")
    with gg.forward_mode():
        ours = kept(lambda: by_jvp(model))
    with sdpa_kernel(SDPBackend.MATH):
        assert ours < 0.4 * kept(lambda: by_jvp(model))


def test_second_gradients_of_a_tangent_are_refused():
    model = made("attention, causal")
    with gg.forward_mode():
        _, tangent = by_jvp(model)
    (first,) = torch.autograd.grad(tangent.square().sum(), model.q.weight, create_graph=True)
    with pytest.raises(gg.ForwardModeError, match="PyTorch's own formulas alone"):
        first.square().sum().backward()


def test_shapes_and_numbers_stay_what_they_are():
    with gg.forward_mode():
        assert type(X.shape) is torch.Size
        assert type(X.tolist()) is list
        assert type(torch.max(X, 0)) is torch.return_types.max


@pytest.mark.parametrize("context", [nullcontext, gg.forward_mode], ids=["outside", "inside"])
def test_the_engine_inside(context):
    """Its own rules are the inner ones."""
    model, loss_fn = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), nn.CrossEntropyLoss(reduction="none")
    args = loss_fn, noise(4, 5).float(), torch.tensor([0, 1, 2, 0])
    with context():
        found = gg.estimate(model, gg.WPerp(k=2), *args, generator=torch.Generator().manual_seed(0))
    wanted = gg.estimate(model, gg.WPerp(k=2), *args, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found.grads, wanted.grads, rtol=0, atol=0)
