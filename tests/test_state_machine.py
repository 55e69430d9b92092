"""A user who does things in any order: steps, checkpoints, hooks, other layers, failures. A slow twin follows.

`GRADGUESS_EXAMPLES=2000 pytest tests/test_state_machine.py` runs it for longer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

import gradguess as gg
import twin
from asserts import assert_same
from gradguess.methods.guessed import as_method
from gradguess.methods.run import Plan, find_layout, run_step
from gradguess.model.task import Task
from gradguess.step.base import Options, State
from models import Block, Net

INPUTS, CLASSES, WORDS = 6, 3, 9
EXAMPLES = os.environ.get("GRADGUESS_EXAMPLES")
cross_entropy = nn.CrossEntropyLoss(reduction="none")


# --- models ----------------------------------------------------------------------------------------------------


def custom() -> nn.Module:
    """The chain of linear layers and ReLUs, without modules for the ReLUs."""
    parts = {"a": nn.Linear(INPUTS, 9), "b": nn.Linear(9, 8), "c": nn.Linear(8, CLASSES)}
    return Net(lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))))), **parts)


def tokens() -> nn.Module:
    """Embedding, positions that the batch shares, attention, a mean over tokens. Any length up to 8."""

    def run(m: nn.Module, words: Tensor) -> Tensor:
        x = m.embed(words) + m.positions(torch.arange(words.shape[1]))
        h = m.norm(x)
        return m.head((x + m.attention(h, h, h, need_weights=False)[0]).mean(1))

    parts = {"embed": nn.Embedding(WORDS, 6), "positions": nn.Embedding(8, 6), "norm": nn.LayerNorm(6)}
    return Net(run, **parts, attention=nn.MultiheadAttention(6, 2, batch_first=True), head=nn.Linear(6, CLASSES))


def stack(*middle: nn.Module, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(INPUTS, 9), *middle, act(), nn.Linear(9, 8), act(), nn.Linear(8, CLASSES, bias=False)
    )


MODELS = {
    "chain": lambda: stack(),
    "custom": custom,
    "tanh": lambda: stack(act=nn.Tanh),
    "residual": lambda: nn.Sequential(nn.Linear(INPUTS, 7), Block(7), Block(7), nn.Linear(7, CLASSES)),
    "tokens": tokens,
    "dropout": lambda: stack(nn.Dropout(0.4)),
    "batch norm": lambda: stack(nn.BatchNorm1d(9)),
}

GUESSES = {
    "shared": lambda k, refresh: gg.WPerp(k=k, refresh=refresh),
    "subspace": lambda k, refresh: gg.WPerp(k=k, refresh=refresh, solver="subspace"),
    "bottom": lambda k, refresh: gg.WPerp(k=k, refresh=refresh, end="bottom"),
    "ns": lambda k, refresh: gg.WPerpNS(k=k, refresh=refresh),
    "wt": lambda k, refresh: gg.WTranspose(),
    "activation": lambda k, refresh: gg.ActivationPerturbation(),
}
FEEDBACK = ["direct", "chained", "corrected"]
WITHOUT_SITES = {"weight": gg.WeightPerturbation(), "backprop": gg.Backprop()}


def broken_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    raise ValueError("this loss is broken")


def nan_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets) * torch.where(torch.arange(len(targets)) == 1, torch.nan, 1.0)


class Hook:
    """Changes a value, and counts how often it is called."""

    def __init__(self, factor: float) -> None:
        self.factor, self.calls = factor, 0

    def after(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return output * self.factor + 0.1

    def before(self, module: nn.Module, args: Any) -> Any:
        self.calls += 1
        return (args[0] * self.factor - 0.1, *args[1:])


def hooks_of(model: nn.Module) -> list[tuple[int, int]]:
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


batches = st.sampled_from([3, 24, 24, 50])
seeds = st.integers(0, 99)


class Training(RuleBasedStateMachine):
    """One `ForwardGradient`, its model, and all that may be done to them."""

    @initialize(
        kind=st.sampled_from([*MODELS, "chain", "chain", "dropout"]),
        guess=st.sampled_from([*GUESSES, *GUESSES, "shared", "shared", *WITHOUT_SITES]),
        form=st.sampled_from([None, None, *FEEDBACK]),
        k=st.sampled_from([2, 4, 8]),
        refresh=st.integers(3, 7),
        rare=st.booleans(),
        tangents=st.sampled_from([1, 1, 2]),
        memory=st.sampled_from(["store", "store", "replay"]),
        chunk=st.sampled_from([None, 7]),
        seed=seeds,
    )
    def begin(
        self,
        kind: str,
        guess: str,
        form: str | None,
        k: int,
        refresh: int,
        rare: bool,
        tangents: int,
        memory: str,
        chunk: int | None,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        self.kind, self.name = kind, guess
        self.model = MODELS[kind]().double()
        self.method = WITHOUT_SITES[guess] if guess in WITHOUT_SITES else GUESSES[guess](k, refresh)
        if form is not None and guess not in (*WITHOUT_SITES, "bottom"):  # nothing is learned from what is not seen
            if memory == "replay" and kind in ("residual", "tokens"):
                form = "direct"  # chains of branches are refused there
            rest = {"every": 2, "fraction": 0.5} if rare else {}
            if kind == "batch norm":
                rest = {}  # part of a batch has other statistics
            self.method = gg.Feedback(self.method, form=form, **rest)
        self.coupling = "batch" if kind == "batch norm" else "sample"
        if kind in ("dropout", "batch norm") or guess in ("ns", "bottom"):
            chunk = None  # these see each piece as a batch
        if isinstance(self.method, gg.Feedback):
            chunk = None  # each piece is a lesson
        self.options = {"tangents": tangents, "memory": memory, "coupling": self.coupling}
        self.chunk, self.dtype, self.length = chunk, torch.float64, 4
        self.forward = self.fresh()
        self.hooks: list[tuple[Hook, Any, nn.Module]] = []
        self.saved: list[dict[str, Tensor]] = []
        self.turn = 0

    def fresh(self, seed: int = 0, **options: Any) -> gg.ForwardGradient:
        return gg.ForwardGradient(
            self.model, self.method, seed=seed, chunk=self.chunk, **{"nonfinite": "skip", **self.options, **options}
        )

    def batch(self, size: int, seed: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(seed)
        targets = torch.randint(CLASSES, (size,), generator=source)
        if self.kind == "tokens":
            return torch.randint(WORDS, (size, self.length), generator=source), targets
        return torch.randn(size, INPUTS, generator=source, dtype=torch.float64).to(self.dtype), targets

    # --- what a user does --------------------------------------------------------------------------------------

    @invariant()
    def a_step_after_everything(self) -> None:
        """Whatever was done, the next step is right; it also leaves behind what may be stale after the next rule."""
        self.turn += 1
        self.checked_step(*self.batch((24, 3, 50)[self.turn % 3], self.turn))

    @rule(size=batches, seed=seeds)
    def step(self, size: int, seed: int) -> None:
        self.checked_step(*self.batch(size, seed))

    @rule(size=batches, seed=seeds)
    def steps_across_a_refresh(self, size: int, seed: int) -> None:
        """Only the last is checked: the others are as fast as a user's."""
        guess, feedback = twin.method_parts(self.method)
        period = getattr(guess, "refresh", 1) * (feedback.every if feedback else 1)
        left = -self.forward.steps % period
        for i in range(min(left, 8)):
            self.forward(cross_entropy, *self.batch(size, seed + i))
            self.descend()
        self.checked_step(*self.batch(size, seed))

    @rule()
    def save(self) -> None:
        self.saved.append(self.forward.state_dict())

    @rule()
    def save_and_go_on_elsewhere(self) -> None:
        """As a checkpoint does, with nothing but the state and the model."""
        state = safetensors.load(safetensors.save(self.forward.state_dict()))
        self.forward = self.fresh(seed=77)
        self.forward.load_state_dict(state)
        assert_same(self.forward.state_dict(), state)

    @precondition(lambda self: self.saved)
    @rule(which=seeds, new=st.booleans())
    def go_back(self, which: int, new: bool) -> None:
        """An earlier state, whatever has become of the model since."""
        if new:
            self.forward = self.fresh(seed=78)
        self.forward.load_state_dict(self.saved[which % len(self.saved)])

    @rule(
        which=seeds,
        factor=st.sampled_from([0.5, 1.5, -1.0]),
        before=st.booleans(),
        where=st.sampled_from(["any", "first"]),
    )
    def add_hook(self, which: int, factor: float, before: bool, where: str) -> None:
        kinds = (nn.Linear, nn.ReLU, nn.Tanh, nn.LayerNorm, nn.GELU)
        modules = [m for m in self.model.modules() if type(m) in kinds]
        module, hook = modules[which % len(modules) if where == "any" else 0], Hook(factor)
        handle = module.register_forward_pre_hook(hook.before) if before else module.register_forward_hook(hook.after)
        self.hooks.append((hook, handle, module))

    @precondition(lambda self: self.hooks)
    @rule(which=seeds)
    def remove_hook(self, which: int) -> None:
        self.hooks.pop(which % len(self.hooks))[1].remove()

    @rule(which=seeds)
    def replace_a_layer(self, which: int) -> None:
        """By a new one of the same size."""
        places = [(parent, name, m) for parent, name, m in self.children() if type(m) is nn.Linear]
        parent, name, old = places[which % len(places)]
        new = nn.Linear(old.in_features, old.out_features, bias=old.bias is not None, dtype=self.dtype)
        self.put(parent, name, new)

    @precondition(lambda self: isinstance(self.model, nn.Sequential))
    @rule(which=seeds, act=st.sampled_from([nn.ReLU, nn.Tanh, nn.GELU, nn.Identity]))
    def replace_an_activation(self, which: int, act: type[nn.Module]) -> None:
        places = [place for place in self.children() if type(place[2]) in (nn.ReLU, nn.Tanh, nn.GELU, nn.Identity)]
        if places:
            parent, name, _ = places[which % len(places)]
            self.put(parent, name, act())

    @precondition(lambda self: self.kind in ("chain", "custom", "tanh", "residual"))
    @rule(width=st.sampled_from([2, 5, 8, 12]), which=st.booleans())
    def another_width(self, width: int, which: bool) -> None:
        """Two layers, one above the other."""
        if self.kind == "residual":
            parent, names = self.model[2 if which else 1], ("up", "down")
        elif self.kind == "custom":
            parent, names = self.model, ("a", "b") if which else ("b", "c")
        else:
            linear = [str(i) for i, m in enumerate(self.model) if type(m) is nn.Linear]
            parent, names = self.model, (linear[0], linear[1]) if which else (linear[1], linear[2])
        below, above = (getattr(parent, name) for name in names)
        self.put(parent, names[0], nn.Linear(below.in_features, width, dtype=self.dtype))
        self.put(parent, names[1], nn.Linear(width, above.out_features, dtype=self.dtype))

    @rule(which=seeds, thaw=st.booleans())
    def freeze(self, which: int, thaw: bool) -> None:
        parameters = list(self.model.parameters())
        parameters[which % len(parameters)].requires_grad_(False)
        if thaw or not any(p.requires_grad for p in parameters):
            self.model.requires_grad_(True)

    @rule()
    def train_or_eval(self) -> None:
        self.model.train(not self.model.training)

    @rule()
    def another_dtype(self) -> None:
        self.dtype = torch.float32 if self.dtype == torch.float64 else torch.float64
        self.model.to(self.dtype)

    @rule(through_data=st.booleans(), seed=seeds)
    def change_parameters(self, through_data: bool, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        for p in self.model.parameters():
            noise = 0.3 * torch.randn(p.shape, generator=source, dtype=torch.float64).to(p.dtype)
            if through_data:
                p.data = p.data + noise
            else:
                with torch.no_grad():
                    p += noise

    @rule()
    def descend(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        torch.optim.SGD(self.model.parameters(), lr=0.05).step()
        self.model.zero_grad()

    @precondition(lambda self: self.kind == "tokens")
    @rule(length=st.sampled_from([3, 4, 6]))
    def another_length(self, length: int) -> None:
        self.length = length

    @rule(size=batches, seed=seeds, how=st.sampled_from(["loss", "shape"]))
    def a_step_that_fails(self, size: int, seed: int, how: str) -> None:
        """It is as if it had not been."""
        x, t = self.batch(size, seed)
        before, grads, buffers = self.forward.state_dict(), grads_of(self.model), twin.World(self.model).buffers
        hooks = hooks_of(self.model)
        loss_fn, x = (broken_loss, x) if how == "loss" else (cross_entropy, x.new_zeros(size, 17))
        with pytest.raises((ValueError, RuntimeError, IndexError), match=r"broken|shape|range"):
            self.forward(loss_fn, x, t)
        assert_same(self.forward.state_dict(), before)
        assert_same(grads_of(self.model), grads)
        assert hooks_of(self.model) == hooks
        assert all(torch.equal(a, b) for a, b in zip(twin.World(self.model).buffers, buffers, strict=True))

    @rule(size=batches, seed=seeds, raises=st.booleans(), inside=st.booleans())
    def a_step_with_nan(self, size: int, seed: int, raises: bool, inside: bool) -> None:
        """It is counted; nothing else changes."""
        x, t = self.batch(size, seed)
        inside = inside and x.is_floating_point()
        if inside:
            x[0, 0] = torch.nan
        before, grads, buffers = self.forward.state_dict(), grads_of(self.model), twin.World(self.model).buffers
        self.forward.nonfinite = "raise" if raises else "skip"
        loss_fn = cross_entropy if inside else nan_loss
        if raises:
            with pytest.raises(gg.NonFiniteError, match="NaN or infinite"):
                self.forward(loss_fn, x, t)
        else:
            assert not torch.isfinite(self.forward(loss_fn, x, t))
        after = self.forward.state_dict()
        assert int(after.pop("steps")) == int(before.pop("steps")) + 1
        assert int(after.pop("skipped")) == int(before.pop("skipped")) + (not raises)
        after.pop("generator"), before.pop("generator")
        assert_same(after, before)
        assert_same(grads_of(self.model), grads)
        assert all(torch.equal(a, b) for a, b in zip(twin.World(self.model).buffers, buffers, strict=True))

    def children(self) -> Iterator[tuple[nn.Module, str, nn.Module]]:
        for parent in self.model.modules():
            if not isinstance(parent, nn.MultiheadAttention):
                for name, child in parent.named_children():
                    yield parent, name, child

    def put(self, parent: nn.Module, name: str, new: nn.Module) -> None:
        setattr(parent, name, new.train(self.model.training))

    # --- the twin ----------------------------------------------------------------------------------------------

    def checked_step(self, x: Tensor, t: Tensor) -> None:
        model, forward = self.model, self.forward
        model.zero_grad()
        world, before, hooks = twin.World(model), State(forward.kept, forward.learned, forward.steps), hooks_of(model)
        state = forward.state_dict()
        live = [hook for hook, _, module in self.hooks if module in set(model.modules())]
        calls = [hook.calls for hook in live]
        loss = forward(cross_entropy, x, t)
        after, grads, found = twin.World(model), grads_of(model), forward.state_dict()
        assert hooks_of(model) == hooks
        assert all(hook.calls > count for hook, count in zip(live, calls, strict=True))
        assert forward.steps == before.count + 1

        # one plain pass: loss, random numbers and buffers
        world.restore()
        with torch.no_grad():
            expected = cross_entropy(model(x), t).mean()
        torch.testing.assert_close(loss, expected, rtol=1e-4 if self.single else 1e-9, atol=1e-6)
        if self.chunk is None or not model.training:
            assert after.same_as(twin.World(model))

        # a new object with nothing but the state
        world.restore()
        model.zero_grad()
        other = self.fresh(seed=79)
        other.load_state_dict(state)
        assert torch.equal(other(cross_entropy, x, t), loss)
        assert_same(grads_of(model), grads)
        assert_same(other.state_dict(), found)
        assert after.same_as(twin.World(model))

        world.restore()
        if not self.single:
            self.compare_with_definition(x, t, before, state["generator"], grads)
        after.restore()

    @property
    def single(self) -> bool:
        return self.dtype == torch.float32

    def compare_with_definition(
        self, x: Tensor, t: Tensor, before: State, noise: Tensor, grads: dict[str, Tensor]
    ) -> None:
        inputs = (cross_entropy, x, t)
        guess, feedback = twin.method_parts(self.method)
        source = torch.Generator()
        source.set_state(noise)
        if self.name == "backprop":
            self.same_grads(grads, twin.Cut(self.model, *inputs, []).to_parameters(self.model, {}))
            return
        options = Options(self.options["tangents"], coupling=self.coupling)
        plan = Plan(as_method(self.method), "auto", options, detail=True)
        task = Task(self.model, *inputs)
        layout = find_layout(plan, task)
        world = twin.World(self.model)
        est, _, _ = run_step(plan, task, layout, source, before)
        world.restore()
        if self.name == "weight":
            self.same_grads(grads, est.grads)
            return
        sites = layout.sites
        cut = twin.Cut(self.model, *inputs, sites)
        assert self.forward.learned is before.learned or feedback is not None
        teaches = feedback is None or before.count % feedback.every == 0
        if teaches:
            count = before.count if feedback is None else before.count // feedback.every
            self.check_kept(before, sites, cut, inputs, guess, count, feedback)
        else:
            assert_same(_plain(self.forward.kept), _plain(before.kept))
        if feedback is not None:  # `test_feedback.py` and random networks have its definition
            return
        g = twin.true_gradients(self.model, *inputs, sites)
        c = est.jvp.double()
        torch.testing.assert_close(c.sum(1), twin.derivative(est.directions, g, sites), rtol=1e-7, atol=1e-8)
        if self.coupling == "sample" and all(site.batch_dim == 0 for site in sites):
            by_sample = sum((est.directions[s.name] * g[s.name]).flatten(2).sum(2) for s in sites)
            torch.testing.assert_close(c, by_sample, rtol=1e-7, atol=1e-8)
        guesses = twin.estimates(est.directions, c, sites, coupled=self.coupling == "batch")
        self.same_grads(grads, cut.to_parameters(self.model, guesses))

    def same_grads(self, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        assert found.keys() == expected.keys()
        # a sample with about as many open units as directions has a nearly singular C: it magnifies what chunks round
        loose = 100 if self.name == "shared" and self.chunk else 1
        for name, grad in expected.items():
            torch.testing.assert_close(
                found[name],
                grad,
                rtol=1e-6 * loose,
                atol=1e-8 * loose,
                msg=lambda m, name=name: f"{name}: {m}",
            )

    def check_kept(
        self,
        before: State,
        sites: tuple[Any, ...],
        cut: twin.Cut,
        inputs: tuple[Any, ...],
        guess: Any,
        count: int,
        feedback: gg.Feedback | None,
    ) -> None:
        """What is kept is what was kept, or what the definition says where a search was due."""
        kept, guessed = self.forward.kept, [site for site in sites if site.guessed]
        if not getattr(guess, "searches", False):
            assert not kept or kept == before.kept
            return
        sized = {site.name: twin.flat(site, cut.above[site.name]).shape[1] for site in guessed}
        stale = any(
            key in before.kept.get(name, {}) and len(before.kept[name][key]) != d
            for name, d in sized.items()
            for key in ("basis", "start")
        )
        stale = stale or any(
            entries.keys() != kept.get(name, {}).keys() for name, entries in before.kept.items() if name in sized
        )  # the layer above is of another kind, and needs something else
        due = count % guess.refresh == 0
        now = due or stale
        loss_fn, x, t = inputs
        if feedback is not None and feedback.fraction < 1:
            rows = max(1, round(feedback.fraction * len(x)))
            cut = twin.Cut(self.model, loss_fn, x[:rows], t[:rows], sites)
        for site in guessed:
            old = before.kept.get(site.name)
            if old is not None and not now:
                assert_same(dict(kept[site.name]), dict(old))
                continue
            if self.name != "shared" or site.linear is None:
                continue
            V = kept[site.name]["basis"]
            assert V.dtype == torch.float64
            warm = None if old is None or not due else old["basis"].double()
            gate = site.gate_at(cut.above[site.name].detach())
            moment = None if gate is None else gate.square().mean(0)
            P, sure = twin.expected_basis(site, guess.k, moment, warm)
            if sure:
                torch.testing.assert_close(V @ V.mT, P, rtol=0, atol=1e-5)


def _plain(entries: Any) -> dict[str, Any]:
    return {name: dict(values) for name, values in entries.items()}


TestTraining = Training.TestCase
TestTraining.settings = settings(
    max_examples=int(EXAMPLES or 20),
    stateful_step_count=12,
    deadline=None,
    derandomize=EXAMPLES is None,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
    phases=[Phase.generate] if EXAMPLES else [Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
)
