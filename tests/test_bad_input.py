"""Bad input: a clear error that says what to do, and nothing changed."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import nn

import gradguess as gg
from asserts import assert_same, assert_same_photograph, photograph
from combinations import each, pairwise
from models import BATCH, GUESSES, cross_entropy, generator, make

FRONT_DOORS = {
    "estimate": lambda model, guess, *args: gg.estimate(model, guess, *args),
    "ForwardGradient": lambda model, guess, *args: gg.ForwardGradient(model, guess)(*args),
}
doors = pytest.mark.parametrize("door", FRONT_DOORS)
guesses = pytest.mark.parametrize("guess", ["weight", "shared"])


@contextmanager
def refused(model: nn.Module, error: type[Exception], match: str):
    """The error comes, says so, and the model is as it was."""
    before = photograph(model)
    with pytest.raises(error, match=match):
        yield
    assert_same_photograph(before, photograph(model))


# --- the loss ------------------------------------------------------------------------------------------------


def per_token(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")


LOSSES = {  # a network, a loss, targets if they are others, and what is said
    "a scalar": ("relu-bias", nn.CrossEntropyLoss(), None, r"one loss per sample.*found a scalar.*reduction='none'"),
    "a matrix": (
        "relu-bias",
        nn.MSELoss(reduction="none"),
        torch.zeros(BATCH, 4).double(),
        r"one loss per sample.*found shape \(5, 4\).*flatten\(1\)\.mean\(1\)",
    ),
    "of tokens": ("tied", per_token, None, r"outputs have shape \(\d, 6, 9\).*returned \d+ losses.*view\(batch, -1\)"),
}


@doors
@guesses
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_that_are_not_one_for_each_sample(door, guess, loss):
    name, loss_fn, targets, match = LOSSES[loss]
    case = make(name)
    with refused(case.model, gg.InputError, match):
        FRONT_DOORS[door](
            case.model, GUESSES[guess], loss_fn, case.inputs, case.targets if targets is None else targets
        )


@doors
def test_an_empty_batch(door):
    case = make("relu-bias")
    with refused(case.model, gg.InputError, "batch is empty.*at least one sample"):
        FRONT_DOORS[door](case.model, gg.WPerp(), cross_entropy, case.inputs[:0], case.targets[:0])


# --- contexts ------------------------------------------------------------------------------------------------


@doors
@guesses
def test_inference_mode(door, guess):
    case = make("relu-bias")
    with (
        refused(case.model, gg.InputError, r"vanish without a word under torch\.inference_mode\(\).*no_grad"),
        torch.inference_mode(),
    ):
        FRONT_DOORS[door](case.model, GUESSES[guess], *case.args)


@doors
@guesses
def test_tensors_made_in_inference_mode(door, guess):
    case = make("relu-bias")
    with torch.inference_mode():
        inputs = case.inputs * 2
    with refused(case.model, gg.InputError, r"made under torch\.inference_mode\(\).*\.clone\(\)"):
        FRONT_DOORS[door](case.model, GUESSES[guess], cross_entropy, inputs, case.targets)


@doors
@guesses
def test_inside_another_dual_level(door, guess):
    case = make("relu-bias")
    with refused(case.model, gg.InputError, r"inside .*dual_level\(\).*Call it outside"), fwAD.dual_level():
        FRONT_DOORS[door](case.model, GUESSES[guess], *case.args)
    FRONT_DOORS[door](case.model, GUESSES[guess], *case.args)  # and then it works


@pytest.mark.parametrize("guess", [*GUESSES, "backprop"])
def test_no_grad_is_fine(guess):
    case = make("branching")
    method = GUESSES.get(guess, gg.Backprop())
    plain = gg.estimate(case.model, method, *case.args, generator=generator())
    with torch.no_grad():
        est = gg.estimate(case.model, method, *case.args, generator=generator())
        gg.ForwardGradient(case.model, method)(*case.args)
    for name in plain.grads:
        assert torch.equal(est.grads[name], plain.grads[name])


# --- numbers that are not finite -----------------------------------------------------------------------------


@pytest.mark.parametrize(("guess", "value"), each([*GUESSES, "backprop"], [float("nan"), float("inf")]))
def test_nan_and_inf_name_the_step(guess, value):
    case = make("gelu-bias")
    forward = gg.ForwardGradient(case.model, GUESSES.get(guess, gg.Backprop()))
    forward(*case.args)
    case.model.zero_grad()
    bad = case.inputs.clone()
    bad[1] = value
    with refused(
        case.model, gg.NonFiniteError, r"loss of 1 sample\(s\) at step 1 is NaN or infinite.*nonfinite='skip'"
    ):
        forward(case.loss_fn, bad, case.targets)
    with refused(case.model, gg.NonFiniteError, "this batch"):
        gg.estimate(case.model, GUESSES.get(guess, gg.Backprop()), case.loss_fn, bad, case.targets)


def test_an_infinite_derivative_of_a_finite_loss():
    """√|x| at zero."""
    model = nn.Linear(6, 1, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    forward = gg.ForwardGradient(model, gg.ActivationPerturbation())
    with refused(model, gg.NonFiniteError, r"directional derivative of 5 sample\(s\) at step 0"):
        forward(lambda o, t: o[:, 0].abs().sqrt(), torch.ones(BATCH, 6).double(), None)


class Root(nn.Module):
    """√ where a ReLU is off: its derivative is infinite, its value is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu().sqrt()


class Zero(nn.Module):
    """0 · √: a Jacobian of NaN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (0 * x).sqrt()


@pytest.mark.parametrize("options", [{}, {"chunk": 3, "isolate": True}], ids=["whole", "chunks"])
@pytest.mark.parametrize(
    ("middle", "method"),
    [
        (Root(), gg.WPerp(k=2, solver="subspace")),
        *((Zero(), gg.WPerp(k=2, solver=solver)) for solver in ("shared", "svd", "subspace")),
        (Zero(), gg.WPerpNS(k=2)),
    ],
    ids=repr,
)
def test_a_factorisation_that_fails_on_a_derivative(middle, method, options):
    case = make("relu-bias")
    linear, _, *rest = case.model
    model = nn.Sequential(linear, middle, *rest)
    with refused(model, gg.NonFiniteError, "directional derivative of .* at step 0 is NaN or infinite"):
        gg.ForwardGradient(model, method, **options)(*case.args)
    for nonfinite, skipped in (("skip", 1), ("ignore", 0)):
        forward = gg.ForwardGradient(model, method, nonfinite=nonfinite, **options)
        assert forward(case.loss_fn, case.inputs, case.targets).isfinite()
        assert (forward.steps, forward.skipped) == (1, skipped)


@pytest.mark.parametrize(
    ("solver", "row", "derivative"), pairwise(["shared", "svd", "subspace"], [1, 9], ["dual", "finite"])
)
def test_nan_in_one_chunk_is_skipped_with_the_whole_batch(solver: str, row: int, derivative: str):
    case = make("relu-bias")
    model, x = case.model, torch.cat([case.inputs] * 12)[:12]
    method = gg.WPerp(k=2, solver=solver)
    forward = gg.ForwardGradient(model, method, chunk=5, nonfinite="skip", derivative=derivative)
    x[row] = float("nan")
    assert forward(case.loss_fn, x, torch.cat([case.targets] * 12)[:12]).isnan()
    assert forward.skipped == 1
    assert all(p.grad is None for p in model.parameters())


# --- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_it", "match"),
    [
        (lambda: gg.WPerp(k=0), r"WPerp\(k\): expected a whole number of at least 1, found 0"),
        (lambda: gg.WPerp(k=2.5), r"WPerp\(k\).*found 2\.5"),
        (lambda: gg.WPerp(k=True), r"WPerp\(k\).*found True"),
        (lambda: gg.WPerp(solver="qr"), r"WPerp\(solver\): expected .*'separable', found 'qr'"),
        (lambda: gg.WPerpNS(steps=0), r"WPerpNS\(steps\)"),
        (lambda: gg.WPreconditioned(sigma=float("nan")), r"WPreconditioned\(sigma\): expected a positive number"),
        (lambda: gg.Feedback(gg.WPerp(), rate=2), r"Feedback\(rate\): expected 0 <= rate < 2 .*found 2"),
        (lambda: gg.Feedback(gg.WPerp(), fraction=0), r"Feedback\(fraction\): expected 0 < fraction <= 1, found 0"),
        (lambda: gg.Feedback(gg.WPerp(), bootstrap=1.1), r"Feedback\(bootstrap\): expected 0 <= bootstrap <= 1"),
        (lambda: gg.baselines.FDFA(0.0), r"FDFA\(momentum\): expected 0 < momentum <= 1"),
        (lambda: gg.baselines.FDFA(1.5), r"FDFA\(momentum\): expected 0 < momentum <= 1"),
        (lambda: gg.baselines.DFA(seed=0.5), r"DFA\(seed\): expected a whole number"),
        (lambda: gg.baselines.MeZO(float("inf")), r"MeZO\(epsilon\): expected a positive number"),
        (lambda: gg.baselines.PredSim(beta=2), r"PredSim\(beta\): expected 0 <= beta <= 1, found 2"),
        (lambda: gg.Students(form="corrected"), r"form\): expected 'direct' or 'chained', found 'corrected'"),
        (lambda: gg.Students(learn=("loss", "loss")), r"learn\): expected"),
        (lambda: gg.Students(lr="fast"), r"lr\): expected a number of at least 0"),
        (lambda: gg.LocalGuess(make=3), r"LocalGuess\(make\): expected a function"),
    ],
)
def test_a_guess_refuses(make_it, match):
    with pytest.raises(gg.InputError, match=match):
        make_it()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tangents": 0}, "tangents: expected a whole number of at least 1, found 0"),
        ({"chunk": True}, "chunk: expected a whole number of at least 1"),
        ({"chunk": 2, "coupling": "batch"}, "samples that mix"),
        ({"memory": "recompute"}, "memory: expected 'store' or 'replay', found 'recompute'"),
        ({"top": "none"}, "top: expected 'guess' or 'exact', found 'none'"),
        ({"nonfinite": "warn"}, "nonfinite: expected 'raise', 'skip' or 'ignore', found 'warn'"),
    ],
)
def test_forward_gradient_refuses(options, match):
    with pytest.raises(gg.InputError, match=match):
        gg.ForwardGradient(nn.Linear(2, 2), gg.WPerp(), **options)


@pytest.mark.parametrize(
    ("sites", "match"),
    [
        ("layers", r"expected 'auto', 'leaf', 'branch', a number or a list.*found 'layers'"),
        ("stem", r"For one module write sites=\['stem'\]"),
        (["long.1.0"], r"no module named 'long\.1\.0'. Nearest: \['long\.1'"),
        (["shard"], r"no module named 'shard'. Nearest: \['shared'"),
        ([], "list of module names is empty"),
    ],
)
def test_unknown_sites(sites, match):
    case = make("branching")
    with refused(case.model, gg.InputError, match):
        gg.estimate(case.model, gg.WPerp(), *case.args, sites=sites)


# --- models --------------------------------------------------------------------------------------------------


@guesses
def test_a_model_without_parameters(guess):
    x, t = torch.randn(BATCH, 4), torch.randint(4, (BATCH,))
    with pytest.raises(gg.InputError, match=r"no parameter.*nothing to"):
        gg.estimate(nn.ReLU(), GUESSES[guess], cross_entropy, x, t)
    with pytest.raises(gg.InputError, match="no parameters: there is nothing to train"):
        gg.ForwardGradient(nn.ReLU(), GUESSES[guess])


@doors
@guesses
def test_a_model_with_all_frozen(door, guess):
    case = make("relu-bias")
    case.model.requires_grad_(False)
    with refused(case.model, gg.InputError, r"no parameter that requires a gradient.*requires_grad_\(True\)"):
        FRONT_DOORS[door](case.model, GUESSES[guess], *case.args)


@doors
def test_a_model_that_calls_no_module(door):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, x):
            return F.linear(x, self.fc.weight, self.fc.bias)

    model, case = Functional().double(), make("relu-bias")
    with refused(model, gg.InputError, r"No module with trainable parameters was called.*self\.fc\(x\).*WeightPert"):
        FRONT_DOORS[door](model, gg.WPerp(), *case.args)
    FRONT_DOORS[door](model, gg.WeightPerturbation(), *case.args)


def test_a_function_instead_of_a_model():
    with pytest.raises(gg.InputError, match=r"expected a torch\.nn\.Module, found function"):
        gg.estimate(lambda x: x, gg.WPerp(), cross_entropy, torch.randn(2, 2), torch.zeros(2).long())
    with pytest.raises(gg.InputError, match=r"expected a torch\.nn\.Module, found function"):
        gg.diagnose(lambda x: x, gg.WPerp(), cross_entropy, torch.randn(2, 2), torch.zeros(2).long())
    with pytest.raises(gg.InputError, match=r"expected a torch\.nn\.Module, found function"):
        gg.ForwardGradient(lambda x: x, gg.WPerp())


SAVED = {  # the method and the model that a state is of, and what is said where W⊥-NS of a chain takes it
    "another method": (gg.WPerp(k=2), "relu-bias", {}, r"expected one of WPerpNS, sites='auto', found one of WPerp, "),
    "a method around it": (gg.Feedback(gg.WPerpNS(k=2)), "relu-bias", {}, r"found one of Feedback\(WPerpNS\), "),
    "other sites": (gg.WPerpNS(k=2), "relu-bias", {"sites": ["2", "0"]}, r"found one of WPerpNS, sites=\['0', '2'\]"),
    "another model": (gg.WPerpNS(k=2), "branching", {}, r"expected sites that are modules of Sequential, found "),
}


@pytest.mark.parametrize("saved", SAVED)
def test_a_state_of_another_method_or_model(saved):
    method, name, options, match = SAVED[saved]
    case, other = make("relu-bias"), make(name)
    forward = gg.ForwardGradient(other.model, method, **options)
    forward(*other.args)
    state = forward.state_dict()
    forward = gg.ForwardGradient(case.model, gg.WPerpNS(k=2), seed=3)
    forward(*case.args)
    before = forward.state_dict()
    with pytest.raises(gg.InputError, match=match):
        forward.load_state_dict(state)
    assert_same(forward.state_dict(), before)


@pytest.mark.parametrize("generator", [torch.zeros(16, dtype=torch.uint8), torch.zeros(5056, dtype=torch.uint8)])
def test_a_state_of_another_generator(generator):
    case = make("relu-bias")
    forward = gg.ForwardGradient(case.model, gg.WPerp(k=2))
    forward(*case.args)
    before = forward.state_dict()
    with pytest.raises(gg.InputError, match=r"expected that of a generator on cpu, 5056 bytes, found \d+ \(RuntimeE"):
        forward.load_state_dict(before | {"generator": generator, "skipped": torch.tensor(7)})
    assert_same(forward.state_dict(), before)


@pytest.mark.parametrize("inside", [False, True], ids=["the model", "a module of it"])
def test_what_torch_compile_returns_is_refused(inside: bool):
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), backend="eager")
    model = nn.Sequential(compiled, nn.Linear(8, 3)) if inside else compiled
    with pytest.raises(gg.InputError, match="Pass the model from before"):
        gg.ForwardGradient(model, gg.WPerp())(
            nn.CrossEntropyLoss(reduction="none"), torch.randn(2, 4), torch.tensor([0, 1])
        )
    module = nn.Linear(4, 3)
    module.compile(backend="eager")
    with pytest.raises(gg.InputError, match="found the model itself compiled"):
        gg.estimate(module, gg.WPerp(), nn.CrossEntropyLoss(reduction="none"), torch.randn(2, 4), torch.tensor([0, 1]))


DETACHED = [gg.Feedback(gg.WPerp(k=2)), gg.Students(), gg.Students(signal="error"), gg.Backprop(), gg.WPerp(k=2)]


@pytest.mark.parametrize("method", DETACHED, ids=repr)
def test_a_loss_without_a_derivative(method):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    forward = gg.ForwardGradient(model, method, sites=2 if isinstance(method, gg.Students) else "auto")
    with pytest.raises(gg.InputError, match="expected losses with a derivative"):
        forward(lambda out, t: (out.detach() - t).square().mean(1), torch.randn(5, 3), torch.randn(5, 2))
    state = forward.state_dict() | {"rows/P/weight": torch.zeros(2)}
    with pytest.raises(gg.InputError, match=r"ForwardGradient\.state_dict\(\) returns, found the key 'rows/P/weight'"):
        forward.load_state_dict(state)
