"""`gg.advise` on five networks: every row works or says why not, and nothing of the user's is changed."""

from __future__ import annotations

import copy
import math
import threading
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradguess as gg
from gaps import NoJvp
from gradguess.advise.advice import BACKPROP, CHECKPOINTED, Advice, Candidate, candidates_for
from gradguess.advise.advise import Trial
from gradguess.errors import InputError, NonFiniteError
from gradguess.model.task import Task
from gradguess_lab.data import Shape
from gradguess_lab.loss import per_sample_loss
from gradguess_lab.networks import build
from models import Calls, Net

SIGNAL, IMAGE = Shape("signal", (40,), 10), Shape("image", (3, 8, 8), 10)
NUMBERS = ("time", "memory", "memory_mb", "cosine", "lowest_cosine")


def registered(name: str, shape: Shape, width: int, depth: int):
    model = build(name, shape, width, depth, False, "relu", torch.Generator().manual_seed(0))
    return model, per_sample_loss, torch.randn(8, *shape.size), torch.randint(10, (8,))


def gpt2():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
    tokens = torch.randint(20, (4, 8))

    def loss_fn(outputs, targets: Tensor) -> Tensor:
        found = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="none")
        return found.view(len(targets), -1).mean(1)

    return transformers.GPT2LMHeadModel(config).train(), loss_fn, tokens, tokens  # with dropout


TASKS = {
    "mlp": lambda: registered("mlp", SIGNAL, 16, 3),
    "cnn": lambda: registered("cnn", IMAGE, 4, 3),
    "gpt2": gpt2,
    "gru": lambda: registered("gru", Shape("signal", (8,), 10), 8, 2),
}


def small():
    return registered("mlp", SIGNAL, 8, 2)


def advise(*task, seconds: float = 0.2, **options) -> Advice:
    return gg.advise(*task, seconds=seconds, **options)


def whole(*task, **options) -> Advice:
    """With every candidate and a single round."""
    return advise(*task, seconds=60, **options)


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(import_module("gradguess.advise.advise"), "ROUNDS", 1)
    monkeypatch.setattr(import_module("gradguess.advise.advise"), "SHORTEST", 0.0)


@pytest.mark.parametrize("name", TASKS)
def test_every_row_works_or_says_why_not(name: str, one_round: None):
    model, loss_fn, x, t = TASKS[name]()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, random, mode = copy.deepcopy(model.state_dict()), torch.get_rng_state(), model.training
    kept, targets = x.clone(), t.clone()
    advice = whole(model, loss_fn, x, t)

    assert [row.method for row in advice] == [candidate.name for candidate in candidates_for(model)]
    for row in advice:
        if row.works:
            assert all(math.isfinite(getattr(row, number)) for number in NUMBERS)
        else:
            assert row.problem
            assert "\n" not in row.problem
            assert "Error:" not in row.problem
    assert advice.method == BACKPROP
    if advice[CHECKPOINTED].works:
        assert advice[CHECKPOINTED].cosine == pytest.approx(1)  # with dropout too: all see the same masks
    fails = {row.method for row in advice if not row.works}
    in_pieces = {candidate.name for candidate in candidates_for(model) if candidate.in_pieces}
    assert fails == (in_pieces if name == "gru" else set())  # no GRU returns a tensor alone: there is no place to cut

    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())
    assert model.training == mode
    assert torch.equal(x, kept)
    assert torch.equal(t, targets)


def test_the_numbers_are_those_of_the_methods(one_round: None):
    advice = whole(*small())
    back, check = advice[BACKPROP], advice[CHECKPOINTED]
    assert back.time == back.memory == 1.0
    assert back.cosine == pytest.approx(1)
    assert back.lowest_cosine == pytest.approx(1)
    assert check.cosine == pytest.approx(1)
    assert check.over_checkpoints == 1.0
    assert check.time == pytest.approx(1 / back.over_checkpoints)
    assert abs(advice["MeZO"].cosine) < 0.5 < advice["Feedback, chained"].cosine < 1


def test_an_error_of_a_candidate_is_its_reason(one_round: None):
    model = nn.Sequential(nn.Linear(40, 8), Calls(NoJvp.apply), nn.Linear(8, 8), Calls(NoJvp.apply), nn.Linear(8, 10))
    advice = whole(model, *small()[1:])
    assert advice[BACKPROP].works
    assert advice["Students"].works
    assert advice["MeZO"].works
    assert "forward" in advice["W⊥"].problem
    assert advice["W⊥"].time is None


def trial(candidate: Candidate, rounds: list[float], search: float = 0.0) -> Trial:
    found = Trial(candidate, Task(*small()), "auto", 4, seed=0)
    found.rounds, found.search = rounds, search
    return found


def test_a_ratio_is_a_median_and_has_its_share_of_searches():
    back, check, rare, *_ = candidates_for(nn.Linear(1, 1))
    guess = Candidate("W⊥", gg.WPerp(refresh=50), "")
    base, other = trial(back, [1.0, 2.0, 4.0]), trial(check, [3.0, 4.0, 400.0])
    assert other.compared(base, base).time == 3.0  # of 3, 2 and 100
    assert trial(guess, [4.0, 4.0, 4.0], search=104.0).compared(base, other).time == 2.0 + 100 / 50 / 2.0
    assert trial(rare, [4.0, 4.0, 4.0], search=104.0).compared(base, other).time == 2.0 + 100 / 200 / 2.0
    base.fail("out of memory")
    assert other.compared(base, base).time is None


# --- models, batches and losses that are not plain ---


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4), torch.randint(3, (6,))


def two() -> nn.Module:
    parts = {"left": nn.Linear(4, 8), "right": nn.Linear(4, 8), "top": nn.Linear(8, 3)}
    return Net(lambda m, x, y: m.top((m.left(x) + m.right(y)).relu()), **parts)


@pytest.mark.parametrize("form", [lambda x: (x, x), lambda x: {"x": x, "y": x}])
def test_every_line_of_code_runs_with_these_inputs(form, one_round: None):
    model, (x, t) = two(), batch()
    names = {"gg": gg, "model": model, "loss_fn": per_sample_loss, "inputs": form(x), "targets": t}
    rows = [row for row in whole(model, per_sample_loss, form(x), t) if row.works]
    assert len(rows) > 5
    for row in rows:
        model.zero_grad()
        exec(row.code, names)
        if row.method != BACKPROP:
            names["forward"](per_sample_loss, names["inputs"], t)
        assert all(p.grad is not None for p in model.parameters())


def test_wrong_input_is_an_error_and_no_row():
    model, loss_fn, x, t = small()
    with pytest.raises(InputError, match="one loss per sample"):
        advise(model, nn.CrossEntropyLoss(), x, t)
    with pytest.raises(NonFiniteError, match="before any step"):
        advise(model, loss_fn, x * math.nan, t)
    with pytest.raises(InputError, match=r"expected a torch\.nn\.Module"):
        advise(len, loss_fn, x, t)
    with pytest.raises(InputError, match="nothing to train"):
        advise(nn.ReLU(), loss_fn, x, t)
    with pytest.raises(InputError, match="seconds: expected a positive number, found 0"):
        advise(model, loss_fn, x, t, seconds=0)
    with pytest.raises(InputError, match="memory_mb: expected a positive number, found '1'"):
        advise(model, loss_fn, x, t, memory_mb="1")
    with pytest.raises(InputError, match="pieces: expected a whole number of at least 2, found 1"):
        advise(model, loss_fn, x, t, pieces=1)
    with pytest.raises(InputError, match="the model has no module named 'nope'"):
        advise(model, loss_fn, x, t, sites=["nope"])
    with pytest.raises(InputError, match="no derivative with respect to any parameter"):
        advise(model, lambda out, t: loss_fn(out.detach(), t), x, t)
    with pytest.raises(InputError, match="lazy layers"):
        advise(nn.LazyLinear(3), loss_fn, x, t)
    with pytest.raises(InputError, match="seconds: expected a positive number, found None"):
        advise(model, loss_fn, x, t, seconds=None)
    with pytest.raises(InputError, match="seed: expected a whole number"):
        advise(model, loss_fn, x, t, seed="a")
    model.lock = threading.Lock()
    with pytest.raises(InputError, match="cannot be copied"):
        advise(model, loss_fn, x, t)
    model, *_ = small()
    model.compile(backend="eager")  # a copy of it would not be compiled, and pass
    with pytest.raises(InputError, match=r"compiled by torch\.compile"):
        advise(model, loss_fn, x, t)
