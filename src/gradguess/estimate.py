"""`estimate`, which computes and writes nothing, and `ForwardGradient`, which writes `.grad` and keeps state."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradguess.backends.policy import one_at_a_time
from gradguess.compile.compiler import Compiler
from gradguess.errors import InputError, NonFiniteError, check_choice, check_count
from gradguess.guesses.base import Guess
from gradguess.methods import Estimate, Method
from gradguess.methods.guessed import as_method
from gradguess.methods.run import Plan, as_it_is, find_layout, run_step, warn_of_mixing
from gradguess.model.hooks import Snapshot, untouched
from gradguess.model.site import Layout, Members, Sites
from gradguess.model.task import LossFn, Task, check_model, opened
from gradguess.step.base import Kept, Options, State, Written
from gradguess.step.parts import pool_of
from gradguess.step.saved import flattened, made_by, random_state, unflattened

LAYOUTS = 16  # so many are remembered


@one_at_a_time
def estimate(
    model: nn.Module,
    guess: Guess | Method,
    loss_fn: LossFn,
    inputs: Any,
    targets: Any,
    tangents: int = 1,
    sites: Sites = "auto",
    generator: torch.Generator | None = None,
    *,
    isolate: bool = False,
    coupling: Literal["sample", "batch"] = "sample",
    balance: bool = False,
    derivative: Literal["dual", "finite"] = "dual",
    top: Literal["guess", "exact"] = "guess",
) -> Estimate:
    """Estimate the gradient of the mean loss of one batch. Writes nothing, holds no state.

    Args:
        model: any module. Its parameters that require a gradient get an estimate.
        guess: how directions are drawn, `gg.WPerp()` for instance, or another method, such as `gg.Feedback(...)`.
        loss_fn: `loss_fn(outputs, targets)` returns one loss per sample, shape (batch,).
        inputs: of the model. A tuple is passed as arguments, a dict as keyword arguments.
        targets: of the loss.
        tangents: the number of directions at each site. The estimate is the average over them.
        sites: where gradients are guessed. "auto" takes the layers that feed an addition if the model has such
            additions, else every layer; "leaf" takes every layer, "branch" is the same as "auto"; a list takes the
            modules with these names; a number cuts the model into so many pieces.
        generator: source of the directions. None makes a new one with a fresh seed.
        isolate: use one tangent per site, so that sites cause each other no noise. `jvp` then has one row per tangent
            and site, tangent by tangent.
        coupling: "sample" where samples do not depend on each other; a warning says if they do. "batch" where a layer
            mixes them (batch norm in training mode): every sample's estimate then uses the directional derivative of
            the whole batch. See `docs/sites.md`.
        balance: scale each site's directions to the tangent that arrives from below, and divide its estimate by the
            same factor, so that the noise of some sites does not drown the others. The mean of the estimate stays
            the same. `Feedback` balances whatever is passed here. See `docs/feedback.md`, "Balanced sites".
        derivative: how directional derivatives are taken. "dual" numbers are exact. "finite" takes differences of two
            more plain passes, for models through which no tangent can pass. See `docs/finite.md`.
        top: what a guess does at the model's output, where nothing lies above. "guess" draws N(0, I), as the paper
            does. "exact" draws nothing there: the derivative of the loss with respect to the outputs is known after
            the forward pass. It needs outputs that are those of a site, unchanged; elsewhere N(0, I) is drawn.
            Of the methods that are no guesses `LocalGuess` alone reads it. See `docs/guesses.md`, "The top".

    Returns:
        an `Estimate`, with a gradient for every parameter that requires one. Parameters that the loss does not depend
        on have a gradient of zero.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> est = gg.estimate(model, gg.WPerp(k=3), torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> sorted(est.grads), est.jvp.shape, est.site_grads["2"].shape
    (['0.bias', '0.weight', '2.bias', '2.weight'], torch.Size([1, 5]), torch.Size([5, 3]))
    """
    options = Options(tangents, isolate, coupling=coupling, balance=balance, derivative=derivative, top=top)
    plan = Plan(as_method(guess), sites, options, detail=True)
    with opened(model, loss_fn, inputs, targets, finite=options.finite) as task:
        layout = find_layout(plan, task)
        warn_of_mixing(plan, task, layout)
        with untouched(model) if layout.leaves_traces else nullcontext():
            result, _, _ = run_step(plan, task, layout, generator or fresh_generator(), State())
    result.check_finite("this batch")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    result.grads = {name: result.grads.get(name, torch.zeros_like(p)) for name, p in parameters.items()}
    return result


class ForwardGradient:
    """Adds estimated gradients to `.grad`, as `loss.backward()` would; any optimiser can follow.

    It owns what lives from step to step: the random generator, what guesses keep (`kept`), what feedback or students
    have learned (`learned`), and the number of steps (`steps`).

    Args:
        model: any module with parameters. It is not changed, but for `.grad` and the buffers that it writes itself.
        guess: as in `estimate`.
        tangents: as in `estimate`.
        memory: "store" keeps each layer's input and direction until the derivative is known. "replay" runs the pass
            a second time instead and adds each gradient to `.grad` as soon as it is made, so that memory besides
            `.grad` does not grow with depth. If such a step raises an error, `.grad` is not to be used: call
            zero_grad(). See `docs/scale.md`, "What replay writes".
        sites: as in `estimate`.
        seed: of the generator, which lives on the device of the first parameter.
        isolate: as in `estimate`. It costs a pass per site.
        coupling: as in `estimate`.
        balance: as in `estimate`.
        nonfinite: what a NaN or infinite loss or derivative does: "raise" an error that names the step, "skip" the
            step (nothing is added to `.grad`, and `skipped` counts it), or "ignore" it (no check, and no wait for a
            GPU). With memory="replay" both are known before the first gradient is written. A gradient that is not
            finite all the same is an error there, even with "skip".
        chunk: run the batch in chunks of at most so many samples, which bounds memory (a search for a basis sees up to
            256 samples, if they are small, whatever the chunk). The estimate is that of the whole batch up to rounding.
            Dropout and batch norm see each chunk as a batch, `Feedback` takes a lesson from each, `balance` takes its
            scales from each, and W⊥-NS takes its singular values from the first.
        group: the processes (of torch.distributed) that share each batch. None takes all of them where
            torch.distributed is initialised, else this process alone. Each process passes its own samples. `.grad` is
            that of all samples, equal in all processes, and for a given seed it does not depend on their number. The
            loss that is returned is of a process's own samples. The model starts as rank 0's.
        compile: trace the step into a graph and compile it (`torch.compile`), once for each kind of step and each shape
            of the batch. It pays in long runs. The control flow of the model may depend on shapes, and not on numbers.
        derivative: as in `estimate`.
        top: as in `estimate`.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> forward = gg.ForwardGradient(model, gg.WPerp(k=3))
    >>> optimiser = torch.optim.AdamW(model.parameters())
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> loss = forward(torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> optimiser.step()
    """

    def __init__(
        self,
        model: nn.Module,
        guess: Guess | Method,
        tangents: int = 1,
        memory: Literal["store", "replay"] = "store",
        sites: Sites = "auto",
        seed: int = 0,
        *,
        isolate: bool = False,
        coupling: Literal["sample", "batch"] = "sample",
        balance: bool = False,
        nonfinite: Literal["raise", "skip", "ignore"] = "raise",
        chunk: int | None = None,
        group: Any = None,
        compile: bool = False,
        derivative: Literal["dual", "finite"] = "dual",
        top: Literal["guess", "exact"] = "guess",
    ) -> None:
        method = as_method(guess)
        check_choice("nonfinite", nonfinite, ("raise", "skip", "ignore"))
        check_model(model)
        if next(model.parameters(), None) is None:
            raise InputError("The model has no parameters: there is nothing to train.")
        if chunk is not None:
            check_count("chunk", chunk)
            if coupling == "batch":
                raise InputError("chunk: samples that mix (coupling='batch') cannot be run in pieces.")
        options = Options(tangents, isolate, memory, coupling, balance, derivative, top)
        self.model, self.guess, self.nonfinite = model, guess, nonfinite
        device = next(model.parameters()).device
        self.generator, self.sketching = torch.Generator(device).manual_seed(seed), torch.Generator(device)
        pool = pool_of(group, model)
        runner = Compiler() if compile else as_it_is
        self.plan = Plan(method, sites, options, chunk=chunk, pool=pool, runner=runner, sketching=self.sketching)
        self.state = State()
        self.skipped = 0
        self.layout: Layout | None = None
        self._layouts: dict[Hashable, Layout] = {}  # of all states that the model was in: compiled steps ask for them
        self.mixes = False  # whether the samples are known to mix: then there is no warning of it
        self.plan.pool.agree([t.data for t in (*model.parameters(), *model.buffers())])

    @property
    def steps(self) -> int:
        """The number of steps that were made, skipped ones included."""
        return self.state.count

    @property
    def kept(self) -> Kept:
        """What the guess keeps between steps, such as bases: site name -> name -> tensor."""
        return self.state.kept

    @property
    def learned(self) -> Kept:
        """What was learned, by site and name: "B" is a feedback matrix, "weights" are those of a student."""
        return self.state.learned

    def __call__(self, loss_fn: LossFn, inputs: Any, targets: Any, *, place: tuple[int, int] | None = None) -> Tensor:
        """Estimate the gradient of the mean loss, add it to `.grad`, and return the mean loss.

        Args:
            loss_fn: `loss_fn(outputs, targets)` returns one loss per sample.
            inputs: of the model; a tuple is passed as arguments, a dict as keyword arguments.
            targets: of the loss.
            place: (number of the first sample, number of all samples) in the batch that a group of processes shares.
                Without it the processes ask each other for it at every step, 8 bytes each.
        """
        return self.step(loss_fn, inputs, targets, place, self.nonfinite)

    @one_at_a_time
    def step(
        self,
        loss_fn: LossFn,
        inputs: Any,
        targets: Any,
        place: tuple[int, int] | None = None,
        nonfinite: str = "raise",
    ) -> Tensor:
        """The same as a call, with `nonfinite` for this step alone.

        Args:
            loss_fn: as in a call.
            inputs: as in a call.
            targets: as in a call.
            place: as in a call.
            nonfinite: "raise", "skip" or "ignore", as in the constructor.
        """
        with opened(self.model, loss_fn, inputs, targets, finite=self.plan.options.finite) as task:
            return self._advance(task, place, nonfinite)

    def _advance(self, task: Task, place: tuple[int, int] | None, nonfinite: str) -> Tensor:
        if self.layout is None or not self.layout.members.current():
            key = Members(self.model).key
            if key not in self._layouts:
                if len(self._layouts) == LAYOUTS:
                    self._layouts.clear()
                self._layouts[key] = find_layout(self.plan, task)
                self.mixes = self.mixes or warn_of_mixing(self.plan, task, self._layouts[key])
            self.layout = self._layouts[key]
        buffers = Snapshot(self.model, random=False) if self.layout.mutates and nonfinite != "ignore" else None
        into = Written(self.layout.members.parameters, nonfinite != "ignore")
        try:
            result, state, self.layout = run_step(self.plan, task, self.layout, self.generator, self.state, place, into)
        except Exception:
            if buffers is not None:
                buffers.restore()
            raise
        if nonfinite != "ignore" and not (result.is_finite() and into.finite):
            if buffers is not None:
                buffers.restore()
            self.state = State(self.state.kept, self.state.learned, state.count)
            if into.added:
                raise NonFiniteError(
                    f"A gradient at step {self.steps - 1} is NaN or infinite, though the losses were not, and "
                    "memory='replay' has added it to .grad: call zero_grad(). memory='store' looks before it writes."
                )
            if nonfinite == "raise":
                result.check_finite(f"step {self.steps - 1}")
            self.skipped += 1
            return result.loss
        self.state, into.checks = state, False  # these were looked at
        for name, grad in result.grads.items():
            into.add(name, grad)
        return result.loss

    def state_dict(self) -> dict[str, Tensor]:
        """All that lives from step to step, as a flat dict of tensors (safetensors can hold it)."""
        numbers = {"generator": self.generator.get_state(), "skipped": torch.tensor(self.skipped)}
        return {**numbers, "method": made_by(self.guess, self.plan.sites), **flattened(self.state)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave, of the same method and sites, and of this model or one like it.

        What a layer that has another size now had kept or learned is found or learned anew.
        """
        missing = {"generator", "steps", "skipped"} - set(state)
        if missing:
            raise InputError(f"state: expected the keys of ForwardGradient.state_dict(), missing {sorted(missing)}.")
        device = self.generator.device
        new = unflattened(state, device, self.model, made_by(self.guess, self.plan.sites))
        self.generator.set_state(random_state(state["generator"], device))
        self.skipped, self.state = int(state["skipped"]), new


def fresh_generator() -> torch.Generator:
    """A generator with a seed that nobody chose."""
    generator = torch.Generator()
    generator.seed()
    return generator
