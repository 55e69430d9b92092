"""The frame of a guess at every site of a case, and dense covariances from it."""

from __future__ import annotations

import torch
from gradguess.layout import lay_out
from gradguess.sites import Layout
from gradguess.task import Task
from torch import Tensor

import gradguess as gg
from gradguess.guesses import Frame
from gradguess.noise import Noise
from gradguess.step import Step
from models import Case, generator
from references import no_trace, recorded_outputs


def frames_of(case: Case, guess: gg.Guess, sites="auto", layout: Layout | None = None) -> dict[str, Frame]:
    """What the guess makes of each site, on this batch."""
    task = Task(case.model, *case.args)
    layout = lay_out(task, sites) if layout is None else layout
    step = Step(task, layout, Noise(generator()))
    with no_trace(case.model):
        step.prepare(guess)
    slots = {site.name: site.slot for site in layout.sites}
    with torch.no_grad(), no_trace(case.model), recorded_outputs(case.model, slots, slots) as outputs:
        case.losses()
    return {site.name: step.frame(guess, site, outputs[site.name].detach()) for site in layout.sites}


def covariance(frame: Frame, d: int) -> Tensor:
    """`A Aᵀ` of every sample, from the frame's own products: (batch, d, d)."""
    eye = torch.eye(d, dtype=frame.dtype)[:, None].expand(d, frame.batch, d)
    return frame.covariance_times(eye).transpose(0, 1)


def matrix(frame: Frame) -> Tensor:
    """`A` of every sample: (batch, d, latent)."""
    eye = torch.eye(frame.latent, dtype=frame.dtype)[:, None].expand(frame.latent, frame.batch, frame.latent)
    return frame.apply(eye).permute(1, 2, 0)


def slots_of(case: Case, sites="auto") -> dict[str, int]:
    """Site name -> which of the tensors that its module returns."""
    return {site.name: site.slot for site in lay_out(Task(case.model, *case.args), sites).sites}
