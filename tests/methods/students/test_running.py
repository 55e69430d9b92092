"""`gg.Students` in the engine: state, parts of a batch, traces, buffers, masks, other models, what it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from asserts import assert_same
from gradguess import captured_step
from gradguess.experiments.studies import zero_students
from gradguess.methods import compiled
from gradguess.methods.run import Plan, find_layout, run_step
from gradguess.methods.students.default import default_student
from gradguess.model.task import Task
from gradguess.step import Options, State
from pieces import CLASSES, PIECES, WIDTH, batch_of, cross_entropy, model_of, small

METHODS = {
    "loss": gg.Students(lr=1e-2),
    "loss chained": gg.Students(form="chained", lr=1e-2),
    "outputs": gg.Students(learn=("loss", "outputs"), lr=1e-2),
    "error": gg.Students(signal="error", lr=1e-2),
    "error chained": gg.Students(signal="error", form="chained", lr=1e-2),
    "tangents": gg.Students(signal="error", learn=("outputs", "tangents"), lr=1e-2),
    "loss, tangents": gg.Students(learn=("loss", "tangents"), lr=1e-2),
    "local": gg.LocalGuess(lr=1e-2),
}


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance * 1e-2, msg=name)


def trained(method: Any, steps: int = 3, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    """Gradients of each step, and the object that made them."""
    model = model or model_of()
    forward = gg.ForwardGradient(model, method, **{"sites": 4, "seed": 2, **options})
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for number in range(steps):
        optimiser.zero_grad()
        torch.manual_seed(number)
        forward(cross_entropy, *batch_of(number))
        found.append(grads(model))
        optimiser.step()
    return found, forward


# --- state -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_step_writes_to_nothing_that_it_is_given(name):
    plan = Plan(METHODS[name], 4, Options(), detail=False)
    task = Task(model_of(), cross_entropy, *batch_of())
    layout, state = find_layout(plan, task), State()
    for number in range(2):
        _, state, _ = run_step(plan, task, layout, torch.Generator().manual_seed(number), state)
    before = copy.deepcopy(state)
    versions = [t._version for entries in state.learned.values() for t in entries.values()]
    made = []
    for _ in range(2):
        torch.rand(3)  # global generators have no say
        random = torch.get_rng_state()
        made.append(run_step(plan, task, layout, torch.Generator().manual_seed(5), state))
        assert torch.equal(torch.get_rng_state(), random)
        assert_same({**state.learned}, {**before.learned})
        assert [t._version for entries in state.learned.values() for t in entries.values()] == versions
    assert_same(made[0][0].grads, made[1][0].grads)
    assert_same({**made[0][1].learned}, {**made[1][1].learned})
    moved = [not torch.equal(made[0][1].learned[site]["weights"], e["weights"]) for site, e in state.learned.items()]
    assert len(moved) == 3
    assert all(moved)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_that_is_resumed_goes_on_bit_for_bit(name):
    wanted, whole = trained(METHODS[name], steps=4)
    model = model_of()
    _, first = trained(METHODS[name], steps=2, model=model)
    state = {key: value.clone() for key, value in first.state_dict().items()}
    method = replace(METHODS[name])  # as in a new process: nothing is remembered
    second = gg.ForwardGradient(model, method, sites=4, seed=99)
    second.load_state_dict(state)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in (2, 3):
        optimiser.zero_grad()
        second(cross_entropy, *batch_of(number))
        assert_same(grads(model), wanted[number])
        optimiser.step()
    assert_same(second.state_dict(), whole.state_dict())


def test_students_start_from_the_seed_and_from_nothing_else():
    starts = []
    for seed in (0, 0, 1):
        model = model_of()
        forward = gg.ForwardGradient(model, gg.Students(learn=()), sites=4, seed=seed)
        torch.manual_seed(len(starts))
        random = torch.get_rng_state()
        forward(cross_entropy, *batch_of())
        assert torch.equal(torch.get_rng_state(), random)
        starts.append({site: entries["weights"] for site, entries in forward.learned.items()})
    assert_same(starts[0], starts[1])
    assert all(not torch.equal(starts[0][site], weights) for site, weights in starts[2].items())
    first, second, _ = starts[0].values()
    assert not torch.equal(first, second)


def test_a_step_that_is_skipped_teaches_nothing():
    model = model_of()
    forward = gg.ForwardGradient(model, gg.Students(), sites=4, nonfinite="skip")
    forward(cross_entropy, *batch_of())
    before = {site: entries["weights"].clone() for site, entries in forward.learned.items()}
    x, t = batch_of(2)
    x[0, 0] = torch.nan
    forward(cross_entropy, x, t)
    assert forward.skipped == 1
    assert_same({site: entries["weights"] for site, entries in forward.learned.items()}, before)


# --- parts of a batch, replay, traces -----------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [2, 4])
@pytest.mark.parametrize("name", ["loss", "loss chained", "local"])
def test_chunks_give_the_gradients_and_the_students_of_the_whole(name, chunk):
    wanted, whole = trained(METHODS[name])
    found, parts = trained(METHODS[name], chunk=chunk)
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 1e-7)
    for site, entries in whole.learned.items():
        assert parts.learned[site].keys() == entries.keys()
        assert parts.learned[site]["count"] == 3
        close({**parts.learned[site]}, {**entries}, 1e-6)


@pytest.mark.parametrize("name", ["error", "error chained"])
def test_chunks_of_relative_rules_weigh_by_their_samples(name):
    """They divide by the size of the chunk's own gradients. Adam's first mean is a tenth of the gradient."""
    _, forward = trained(METHODS[name], steps=1, chunk=4)
    assert all(set(entries) == {"weights", "mean", "square", "count"} for entries in forward.learned.values())
    x, t = batch_of(0)
    means: dict[str, Any] = {}
    for rows, share in ((slice(0, 4), 4 / 6), (slice(4, 6), 2 / 6)):
        part = gg.ForwardGradient(model_of(), METHODS[name], sites=4, seed=2)
        part(cross_entropy, x[rows], t[rows])
        for site, entries in part.learned.items():
            means[site] = means.get(site, 0) + share * entries["mean"]
    for site, mean in means.items():
        torch.testing.assert_close(forward.learned[site]["mean"], mean)


@pytest.mark.parametrize("name", METHODS)
def test_replay_gives_what_store_gives(name):
    wanted, stored = trained(METHODS[name])
    found, replayed = trained(METHODS[name], memory="replay")
    for a, b in zip(found, wanted, strict=True):
        close(a, b)
    for site, entries in stored.learned.items():
        close({**replayed.learned[site]}, {**entries}, 1e-7)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "local"])
def test_a_traced_step_is_the_same(name, monkeypatch):
    monkeypatch.setattr(compiled, "compiled", lambda graph, arguments: graph)
    wanted, plain = trained(METHODS[name], steps=5)
    found, traced = trained(METHODS[name], steps=5, compile=True)  # a warning would be an error
    assert len(traced.plan.runner._graphs) == 1
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 1e-8)
    for site, entries in plain.learned.items():
        close({**traced.learned[site]}, {**entries}, 1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_the_caller_may_have_switched_gradients_off(name):
    wanted, _ = trained(METHODS[name], steps=2)
    with torch.no_grad():
        found, _ = trained(METHODS[name], steps=2)
    assert_same(found[1], wanted[1])


def test_a_local_guess_that_cannot_be_traced_says_so():
    with pytest.warns(UserWarning, match="compile=True has no effect"):
        found, _ = trained(METHODS["local"], steps=4, compile=True)
    for a, b in zip(found, trained(METHODS["local"], steps=4)[0], strict=True):
        close(a, b)


@pytest.mark.parametrize("name", ["loss", "error chained"])
def test_a_captured_step_takes_the_state_over_in_place(name, monkeypatch):
    """Without a device every step runs by itself: what is tested is the memory in which students live."""
    monkeypatch.setattr(captured_step, "require", lambda device, what: None)
    monkeypatch.setattr(captured_step, "on_side_stream", lambda function: function())
    monkeypatch.setattr(captured_step, "WARM_UP", 99)
    wanted, plain = trained(METHODS[name], steps=4)
    model = model_of()
    forward = gg.ForwardGradient(model, METHODS[name], sites=4, seed=2)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    optimiser.param_groups[0]["capturable"] = True
    step = gg.CapturedStep(forward, optimiser, cross_entropy)
    places = []
    for number in range(4):
        step(*batch_of(number))
        places.append([t.data_ptr() for entries in forward.learned.values() for t in entries.values()])
        assert_same(grads(model), wanted[number])
    assert all(place == places[0] for place in places)
    assert_same({**forward.learned}, {**plain.learned})
    assert forward.plan.method.kind(1) == forward.plan.method.kind(17) is not None


@pytest.mark.parametrize(
    ("method", "recorded"), [(METHODS["loss"], True), (METHODS["error"], True), (METHODS["tangents"], False)]
)
def test_one_pass_over_batch_norm_may_be_recorded(method, recorded, monkeypatch):
    monkeypatch.setattr(captured_step, "require", lambda device, what: None)
    monkeypatch.setattr(captured_step, "on_side_stream", lambda function: function())
    model = images_model()
    forward = gg.ForwardGradient(model, method, sites=3)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    optimiser.param_groups[0]["capturable"] = True
    step = gg.CapturedStep(forward, optimiser, cross_entropy)
    step(*images())
    assert step._is_fragile("plain") is not recorded


# --- buffers and masks ---------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """Convolution, batch norm, ReLU in place, and what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)) + x)


def images_model() -> nn.Sequential:
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES)]
    return nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), *(Convolutions(6) for _ in range(4)), *head).double()


def images() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(3)
    x = torch.randn(5, 2, 8, 8, generator=source, dtype=torch.float64)
    return x, torch.randint(CLASSES, (5,), generator=source)


@pytest.mark.parametrize("name", METHODS)
def test_batch_norm_writes_its_buffers_as_under_backpropagation(name):
    model, other = images_model(), images_model()
    x, t = images()
    forward = gg.ForwardGradient(model, METHODS[name], sites=3)
    for _ in range(2):
        forward(cross_entropy, x, t)
        cross_entropy(other(x), t).mean().backward()
    close(dict(model.named_buffers()), dict(other.named_buffers()))


@pytest.mark.parametrize("name", METHODS)
def test_what_follows_a_cut_may_work_in_place(name):
    found = []
    for inplace in (False, True):
        torch.manual_seed(0)
        layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.ReLU(inplace))]
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace), *layers, nn.Linear(8, CLASSES)).double()
        forward = gg.ForwardGradient(model, METHODS[name], sites=["0", "2", "4", "8"])
        forward(cross_entropy, *batch_of())
        found.append(grads(model) | {site: entries["weights"] for site, entries in forward.learned.items()})
    close(*found)


def test_the_top_piece_has_the_gradient_of_backpropagation():
    """With batch statistics inside the pieces, and masks of dropout."""
    model = images_model()
    model.insert(len(model) - 1, nn.Dropout(0.5))
    other = copy.deepcopy(model)
    x, t = images()
    torch.manual_seed(7)
    gg.ForwardGradient(model, gg.Students(), sites=3)(cross_entropy, x, t)
    torch.manual_seed(7)
    cross_entropy(other(x), t).mean().backward()
    found, wanted = grads(model), grads(other)
    top = [name for name in wanted if name.startswith(("4.", "8."))]
    assert len(top) == 6
    close({name: found[name] for name in top}, {name: wanted[name] for name in top})


@pytest.mark.parametrize("name", ["loss", "loss chained", "error", "error chained", "tangents"])
def test_masks_of_dropout_are_drawn_once(name):
    """The estimate at the last cut in the chained form, and all of the top piece, are those of one set of masks."""
    seen: list[Tensor] = []

    class Noted(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.append(out.detach() != 0)
            return out

    model = nn.Sequential(nn.Linear(5, 16), Noted(), nn.Linear(16, 16), Noted(), nn.Linear(16, CLASSES)).double()
    forward = gg.ForwardGradient(model, METHODS[name], sites=["0", "2", "4"])
    x, t = batch_of()
    forward(cross_entropy, x, t)
    seen.clear()
    forward(cross_entropy, x, t)
    assert len(seen) in (2, 4)
    assert len(seen) == 2 or all(torch.equal(a, b) for a, b in zip(seen[:2], seen[2:], strict=True))


# --- models ----------------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """A character transformer, with an output for every token; with `pooled`, one for each sequence."""

    def __init__(self, pooled: bool = False) -> None:
        super().__init__()
        layer = lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)  # noqa: E731
        self.embed, self.blocks = nn.Embedding(9, 8), nn.ModuleList(layer() for _ in range(4))
        self.head, self.pooled = nn.Linear(8, 9), pooled

    def forward(self, x: Tensor) -> Tensor:
        s = self.embed(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=s.dtype)
        for block in self.blocks:
            s = block(s, src_mask=mask)
        return self.head(s.mean(1) if self.pooled else s)


def tokens_loss(out: Tensor, t: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.mT, t, reduction="none").mean(1)


def descends(model: nn.Module, method: Any, loss_fn: Any, x: Any, t: Any, steps: int = 30, **options: Any) -> None:
    forward = gg.ForwardGradient(model, method, **{"sites": 3, **options})
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        losses.append(float(forward(loss_fn, x, t)))
        optimiser.step()
    assert losses[-1] < 0.7 * losses[0], losses
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", ["loss", "error", "tangents"])
def test_a_transformer_learns(name):
    torch.manual_seed(0)
    x = torch.randint(9, (4, 7))
    descends(Tokens(), METHODS[name], tokens_loss, x, x.roll(-1, 1))


def test_a_transformer_with_one_output_for_each_sequence_learns():
    torch.manual_seed(0)
    descends(Tokens(pooled=True), METHODS["loss"], cross_entropy, torch.randint(9, (4, 7)), torch.arange(4))


def test_sequences_of_another_length_have_the_same_students():
    torch.manual_seed(0)
    model = Tokens()
    forward = gg.ForwardGradient(model, METHODS["error"], sites=3)
    for length in (7, 5, 9, 7):
        x = torch.randint(9, (4, length))
        forward(tokens_loss, x, x)
    assert all(entries["count"] == 4 for entries in forward.learned.values())


@pytest.mark.parametrize("name", ["loss", "loss chained", "error"])
def test_a_convolutional_network_with_batch_norm_learns(name):
    descends(images_model().float(), METHODS[name], cross_entropy, images()[0].float(), images()[1])


def test_gpt2_learns():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 8, "n_layer": 4, "n_head": 2, "vocab_size": 17, "n_positions": 6, "use_cache": False}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
    x = torch.randint(0, 17, (3, 6))

    def loss_fn(out: Any, t: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.logits[:, :-1].mT, t[:, 1:], reduction="none").mean(1)

    descends(model, gg.Students(lr=1e-2), loss_fn, x, x, steps=60)


def test_a_causal_student_does_not_see_later_tokens():
    student = default_student((6, 32), (6, 11))
    s = torch.randn(2, 6, 32, requires_grad=True)
    (g,) = torch.autograd.grad(student(s)[:, 2].sum(), s)
    assert (g[:, :3] != 0).any(-1).all()
    assert (g[:, 3:] == 0).all()


@pytest.mark.parametrize("outputs", [(), (3,), (2, 3), (3, 9, 9)])
@pytest.mark.parametrize("shape", [(8,), (6, 16), (4, 1, 1), (4, 9, 7), (3, 70, 40)])
def test_default_students_have_the_outputs_shape(shape, outputs):
    assert default_student(shape, outputs)(torch.randn(3, *shape)).shape == (3, *outputs)


def test_under_autocast_the_weights_stay_float32():
    torch.manual_seed(0)
    model = model_of().float()
    for name in ("loss", "error chained", "tangents"):
        forward = gg.ForwardGradient(model, METHODS[name], sites=4)
        x, t = batch_of()
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                loss = forward(cross_entropy, x.float(), t)
        assert torch.isfinite(loss)
        assert all(t.dtype == torch.float32 for entries in forward.learned.values() for t in entries.values())
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_under_autocast_a_student_is_called_with_float32_weights():
    class Noted(nn.Linear):
        def forward(self, s: Tensor) -> Tensor:
            seen.append((s.dtype, self.weight.dtype))
            return super().forward(s)

    seen: list[tuple[torch.dtype, torch.dtype]] = []
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES))
    forward = gg.ForwardGradient(model, gg.Students(lambda shape, outputs: Noted(*shape, *outputs)), sites=3)
    with torch.autocast("cpu", torch.bfloat16):
        forward(cross_entropy, batch_of()[0].float(), batch_of()[1])
    assert set(seen) == {(torch.bfloat16, torch.float32)}


def test_a_model_in_half_precision_has_students_whose_moments_are_not():
    forward = gg.ForwardGradient(model_of().bfloat16(), gg.Students(signal="error"), sites=4)
    x, t = batch_of()
    assert torch.isfinite(forward(cross_entropy, x.bfloat16(), t))
    assert all(t.dtype == torch.float32 for entries in forward.learned.values() for t in entries.values())


def test_sites_that_end_below_the_output_have_students_as_well():
    """What lies above the last named site is the top piece."""
    x, t = batch_of()
    found = {}
    for sites in (["1", "3", "5"], ["1", "3", "5", "8"]):
        model = model_of()
        forward = gg.ForwardGradient(model, gg.Students(), sites=sites)
        forward(cross_entropy, x, t)
        assert list(forward.learned) == ["1", "3", "5"]
        found[len(sites)] = grads(model)
    close(found[3], found[4])


def test_frozen_layers_below_and_between():
    for frozen in (slice(0, 2), slice(2, 4)):
        model = model_of()
        model[frozen].requires_grad_(False)
        for method in (gg.Students(), gg.Students(form="chained"), gg.Students(signal="error")):
            model.zero_grad()
            forward = gg.ForwardGradient(model, method, sites=["1", "3", "5", "8"] if frozen.start else ["3", "5", "8"])
            forward(cross_entropy, *batch_of())
            assert {name for name, p in model.named_parameters() if p.requires_grad} == grads(model).keys()


def test_the_details_of_an_estimate():
    model = model_of()
    x, t = batch_of()
    est = gg.estimate(model, gg.Students(small, form="chained"), cross_entropy, x, t, sites=4)
    true = gg.estimate(model, gg.Backprop(), cross_entropy, x, t, sites=4)
    names = list(true.site_grads)
    torch.testing.assert_close(est.site_grads[names[2]], true.site_grads[names[2]])  # one hop from the loss
    assert not torch.allclose(est.site_grads[names[0]], true.site_grads[names[0]])
    torch.testing.assert_close(est.site_grads[names[3]], true.site_grads[names[3]])
    assert est.jvp.shape == (0, len(x))
    report = gg.diagnose(model, gg.Students(small), cross_entropy, x, t, sites=4, curve=False)
    assert list(report) == names


def test_nothing_predicted_leaves_the_lower_pieces_alone():
    model = model_of()
    gg.ForwardGradient(model, zero_students(), sites=["1", "3", "5", "8"])(cross_entropy, *batch_of())
    for name, grad in grads(model).items():
        assert bool((grad != 0).any()) == (int(name.split(".")[0]) >= PIECES[-1].start), name


def test_what_a_student_does_not_learn_stays():
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.head = nn.Linear(WIDTH, 20).requires_grad_(False), nn.Linear(20, CLASSES)
            self.norm = nn.BatchNorm1d(20)

        def forward(self, s: Tensor) -> Tensor:
            return self.head(self.norm(self.features(s)))

    _, forward = trained(gg.Students(lambda shape, outputs: Frozen()), steps=2)
    assert all(len(entries["weights"]) == 21 * CLASSES + 40 for entries in forward.learned.values())


# --- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"signal": "target"}, r"signal\): expected 'loss' or 'error', found 'target'"),
        ({"form": "corrected"}, r"form\): expected 'direct' or 'chained', found 'corrected'"),
        ({"learn": "teacher"}, r"learn\): expected one of 'loss', .*found 'teacher'"),
        ({"learn": ("loss", "loss")}, r"learn\): expected"),
        ({"learn": ["loss"]}, r"learn\): expected"),
        ({"lr": -1}, r"lr\): expected a number of at least 0, found -1"),
        ({"lr": "fast"}, r"lr\): expected a number"),
        ({"make": nn.Linear(2, 2).weight}, r"make\): expected a function of \(shape, outputs\)"),
    ],
)
def test_what_no_students_can_be_made_from(arguments, message):
    with pytest.raises(gg.InputError, match=message):
        gg.Students(**arguments)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(5, WIDTH), nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        s = self.body(x).relu()
        return self.a(s), self.b(s)


def wrong_shape(shape: tuple[int, ...], outputs: tuple[int, ...]) -> nn.Module:
    return nn.Linear(shape[0], outputs[0] + 1)


@pytest.mark.parametrize("method", [gg.Students(), gg.Students(learn="chain"), gg.Students(signal="error")])
def test_a_model_without_a_cut_is_refused(method):
    with pytest.raises(gg.InputError, match=r"at least one cut with a piece above it\. Use sites=2"):
        gg.ForwardGradient(model_of(), method, sites=1)(cross_entropy, *batch_of())


@pytest.mark.parametrize(
    ("method", "model", "sites", "message"),
    [
        (gg.Students(), model_of(), "auto", "follow one another in a line.*sites=4"),
        (gg.Students(lambda shape, outputs: 3), model_of(), 4, r"returned? .*int"),
        (gg.Students(wrong_shape), model_of(), 4, r"must return the shape of the model's outputs, \(6, 4\), found"),
        (gg.Students(), Pair().double(), ["body"], "returns one floating-point tensor.*found 2"),
    ],
)
def test_what_cannot_be_run_says_why(method, model, sites, message):
    loss = lambda out, t: cross_entropy(out[0] if isinstance(out, tuple) else out, t)  # noqa: E731
    with pytest.raises(gg.InputError, match=message):
        gg.ForwardGradient(model, method, sites=sites)(loss, *batch_of())


def test_time_first_is_refused():
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x.transpose(0, 1))).mean(0))

    x, t = torch.randn(6, 3, 5), torch.randint(CLASSES, (6,))
    with pytest.raises(gg.InputError, match=r"tensor \(batch, ...\).*'a'.*dimension 1.*sites="):
        gg.ForwardGradient(Turned(), gg.Students(), sites=3)(cross_entropy, x, t)


def test_a_shape_without_a_default_student_is_refused():
    with pytest.raises(gg.InputError, match=r"found shape \(2, 3, 4, 5\). Pass make="):
        default_student((2, 3, 4, 5), (10,))
