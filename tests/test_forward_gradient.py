"""`gg.ForwardGradient`: writes `.grad` as backward() would, keeps state, and costs no reverse graph."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradguess as gg
from asserts import assert_close, assert_same
from combinations import each, pairwise
from models import BATCH, GUESSES, SITE_GUESSES, STUDENTS, ZOO, Case, Net, Repeats, generator, make

FEEDBACK = {f"feedback-{form}": gg.Feedback(gg.WPerp(k=3), form=form) for form in ("direct", "chained", "corrected")}
METHODS = {**GUESSES, **FEEDBACK, "backprop": gg.Backprop()}


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(case: Case, forward: gg.ForwardGradient, steps: int = 3, lr: float = 0.05) -> list[float]:
    optimiser = torch.optim.SGD(case.model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        losses.append(float(forward(*case.args)))
        optimiser.step()
    return losses


# --- what it writes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guess", METHODS)
def test_gradients_accumulate(guess):
    case = make("branching")
    forward = gg.ForwardGradient(case.model, METHODS[guess], seed=1)
    forward(*case.args)
    first = grads(case.model)
    forward(*case.args)
    both = grads(case.model)
    case.model.zero_grad()
    again = gg.ForwardGradient(case.model, METHODS[guess], seed=1)
    again(*case.args)
    case.model.zero_grad()
    again(*case.args)
    for name, second in grads(case.model).items():
        torch.testing.assert_close(both[name], first[name] + second, rtol=0, atol=1e-13)


def test_gradients_of_two_parameters_never_share_memory():
    """`a` and `b` enter as a + b and get the same gradient: clipping one must not touch the other."""
    for method in (gg.Backprop(), gg.ActivationPerturbation(), FEEDBACK["feedback-chained"]):
        case = make("bare")
        forward = gg.ForwardGradient(case.model, method, seed=1)
        forward(*case.args)
        pointers = [p.grad.data_ptr() for p in case.model.parameters()]
        assert len(set(pointers)) == len(pointers)
        first = grads(case.model)
        torch.testing.assert_close(first["a"], first["b"], rtol=0, atol=0)
        case.model.a.grad.mul_(0)
        assert torch.equal(case.model.b.grad, first["b"])


def test_sparse_gradients_stay_sparse():
    model = nn.Sequential(nn.EmbeddingBag(5, 8, mode="sum", sparse=True), nn.ReLU(), nn.Linear(8, 3))
    x, t = torch.randint(5, (6, 4)), torch.randint(3, (6,))
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    forward = gg.ForwardGradient(model, gg.Backprop())
    for _ in range(2):
        forward(loss_fn, x, t)
    found = model[0].weight.grad
    model.zero_grad()
    loss_fn(model(x), t).mean().backward()
    assert found.is_sparse
    torch.testing.assert_close(found.to_dense(), 2 * model[0].weight.grad.to_dense())


@pytest.mark.parametrize("guess", METHODS)
def test_frozen_parameters_get_no_grad(guess):
    case = make("frozen")
    forward = gg.ForwardGradient(case.model, METHODS[guess])
    forward(*case.args)
    for name, p in case.model.named_parameters():
        assert (p.grad is not None) == p.requires_grad, name


# --- state ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guess", "name"), each([n for n in (*METHODS, *STUDENTS) if n != "backprop"], ["relu-bias", "residual"])
)
def test_a_restored_run_continues_bit_for_bit(name, guess, tmp_path):
    """Through a file, in the middle between two refreshes."""
    method, sites = {**METHODS, **STUDENTS}[guess], 3 if guess in STUDENTS else "auto"
    case = make(name)
    forward = gg.ForwardGradient(case.model, method, seed=2, sites=sites)
    train(case, forward, 3)
    torch.save((case.model.state_dict(), forward.state_dict()), tmp_path / "state.pt")
    expected = train(case, forward, 3), grads(case.model)

    other = make(name, seed=9)
    other.inputs, other.targets = case.inputs, case.targets
    restored = gg.ForwardGradient(other.model, copy.deepcopy(method), seed=77, sites=sites)
    model_state, state = torch.load(tmp_path / "state.pt", weights_only=True)
    other.model.load_state_dict(model_state)
    restored.load_state_dict(state)
    assert restored.steps == 3
    found = train(other, restored, 3), grads(other.model)
    assert found[0] == expected[0]
    assert_same(found[1], expected[1])


# --- store and replay ----------------------------------------------------------------------------------------


def functional_attention() -> nn.Module:
    """Closed-form layers around a fused kernel: the replay must choose the same kernel as the tangent pass."""

    def run(m, x):
        q, k, v = m.qkv(x).chunk(3, -1)
        return m.out(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0].mean(1))

    return Net(run, qkv=nn.Linear(6, 24), out=nn.Linear(8, 4))


def attention_case() -> Case:
    torch.manual_seed(0)
    return Case(functional_attention().double(), torch.randn(BATCH, 5, 6).double(), torch.randint(4, (BATCH,)))


REPLAYED = [
    "relu-bias",
    "gelu-no-bias",
    "residual",
    "transformer",
    "branching",
    "dropout",
    "batch-norm",
    "lstm",
    "in-place",
]


@pytest.mark.parametrize(
    ("guess", "name"),
    each([*GUESSES, "shared", "wt"], [*REPLAYED, "attention"]),
)
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_replay_is_store_bit_for_bit(guess, name):
    results = []
    for memory in ("store", "replay"):
        case = attention_case() if name == "attention" else make(name)
        torch.manual_seed(11)  # dropout masks
        forward = gg.ForwardGradient(case.model, GUESSES[guess], tangents=2, memory=memory, seed=1)
        losses = train(case, forward, 2)
        results.append((losses, grads(case.model), case.model.state_dict(), torch.get_rng_state()))
    (losses, *store), (replayed, *replay) = results
    assert losses == replayed
    for a, b in zip(store, replay, strict=True):
        assert_same(a, b)


def test_an_input_changed_in_place_is_noticed_and_replay_copes():
    class InPlace(nn.Module):
        def __init__(self, in_place: bool):
            super().__init__()
            self.a, self.b, self.in_place = nn.Linear(6, 6), nn.Linear(6, 4), in_place

        def forward(self, x):
            x = torch.tanh(self.a(x))
            y = self.b(x)
            x = x.add_(1) if self.in_place else x + 1
            return y + x[:, :4]

    torch.manual_seed(0)
    case = Case(InPlace(True).double(), torch.randn(BATCH, 6).double(), torch.randint(4, (BATCH,)))
    with pytest.raises(gg.InputError, match=r"input of 'b' was changed in place.*memory='replay'"):
        gg.ForwardGradient(case.model, gg.ActivationPerturbation(), sites=["a", "b"])(*case.args)
    assert all(p.grad is None for p in case.model.parameters())
    gg.ForwardGradient(case.model, gg.ActivationPerturbation(), sites=["a", "b"], memory="replay")(*case.args)
    twin = InPlace(False).double()
    twin.load_state_dict(case.model.state_dict())
    est = gg.estimate(twin, gg.ActivationPerturbation(), *case.args, sites=["a", "b"], generator=generator())
    assert_close(grads(case.model), est.grads, atol=1e-13)


# --- no reverse graph ----------------------------------------------------------------------------------------


def forbidden(tensor: Tensor) -> Tensor:
    raise AssertionError(f"a reverse graph was recorded: saved a tensor of shape {tuple(tensor.shape)}")


@pytest.mark.parametrize(
    ("guess", "name", "memory"),
    pairwise(GUESSES, ["relu-bias", "gelu-no-bias", "in-place"], ["store", "replay"]),
)
def test_no_reverse_graph_in_closed_form(name, guess, memory):
    case = make(name)
    forward = gg.ForwardGradient(case.model, GUESSES[guess], tangents=2, memory=memory)
    forward(*case.args)  # lays the model out
    with torch.autograd.graph.saved_tensors_hooks(forbidden, lambda packed: packed):
        forward(*case.args)
    assert all(not p.grad.requires_grad for p in case.model.parameters())


@pytest.mark.parametrize("name", ZOO)
def test_weight_perturbation_never_records(name):
    case = make(name)
    with torch.autograd.graph.saved_tensors_hooks(forbidden, lambda packed: packed):
        gg.ForwardGradient(case.model, gg.WeightPerturbation())(*case.args)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_a_stored_step_calls_the_model_once(name):
    """Values with a reverse graph, cut at the sites, and their tangents are of one pass."""
    case, calls = make(name), []
    case.model.register_forward_pre_hook(lambda module, args: calls.append(1))
    forward = gg.ForwardGradient(case.model, gg.ActivationPerturbation())  # it reads no Jacobian
    forward(*case.args)
    calls.clear()
    forward(*case.args)
    assert len(calls) == 1


# --- other calls, other shapes -------------------------------------------------------------------------------


@pytest.mark.parametrize("guess", METHODS)
def test_a_module_called_another_number_of_times(guess):
    case = make("repeats")
    x = case.inputs
    forward = gg.ForwardGradient(case.model, METHODS[guess], seed=3)
    for times in (2, 4, 1, 0, 3):
        case.model.zero_grad()
        forward(case.loss_fn, (x, times), case.targets)
        assert case.model.first.weight.grad.abs().max() > 0
        if guess != "weight":  # that one guesses for parameters which play no part, too
            grad = case.model.again.weight.grad
            assert (grad is not None and bool(grad.any())) == (times > 0)


def test_statistics_are_updated_once_when_the_calls_change():
    class Normed(Repeats):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x, times):
            return super().forward(self.norm(x), times)

    torch.manual_seed(0)
    model, x, t = Normed(), torch.randn(BATCH, 6), torch.randint(4, (BATCH,))
    forward = gg.ForwardGradient(model, gg.WTranspose())
    for i, times in enumerate((1, 2, 2, 3)):
        forward(nn.CrossEntropyLoss(reduction="none"), (x, times), t)
        assert model.norm.num_batches_tracked == i + 1


# --- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guess", SITE_GUESSES)
def test_what_is_cached_lies_in_memory_as_a_checkpoint_would_put_it(guess):
    """Products with another order in memory round differently: a resumed run would drift."""
    case = make("relu-bias")
    forward = gg.ForwardGradient(case.model, SITE_GUESSES[guess])
    forward(*case.args)
    assert all(value.is_contiguous() for value in forward.state_dict().values())


@pytest.mark.parametrize("method", ["backprop", "WPerp", "feedback-chained"])
def test_gradients_lie_in_memory_as_their_parameters(method: str):
    """As after backward(). Fused optimisers read both in the order of the memory, and would mix up the entries."""
    guess = gg.WPerp(k=3) if method == "WPerp" else METHODS[method]
    generated = torch.Generator().manual_seed(0)
    x, t = torch.randn(BATCH, 3, 6, 6, generator=generated), torch.arange(BATCH) % 4
    layers = nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 4)
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    model[5].weight = nn.Parameter(torch.randn(20, 4, generator=generated).T)
    forward = gg.ForwardGradient(model, guess)
    forward(nn.CrossEntropyLoss(reduction="none"), x, t)
    first = grads(model)
    assert {name for name, p in model.named_parameters() if p.stride() != p.grad.stride()} == set()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] - 0.1 * first[name])
