"""The frame of a guess at every site of a case, and dense covariances from it."""

from __future__ import annotations

import torch
from torch import Tensor

import gradguess as gg
from gradguess.guesses import Frame
from gradguess.model.site import Layout
from gradguess.step.measure import Drawing
from models import Case
from references import no_trace, recorded_outputs
from steps import layout_of, step_of


def frames_of(case: Case, guess: gg.Guess, sites="auto", layout: Layout | None = None) -> dict[str, Frame]:
    """What the guess makes of each site, on this batch."""
    step = step_of(case, guess, sites=sites, layout=layout)
    with no_trace(case.model):
        drawing = Drawing(step, guess)
    slots = {site.name: site.slot for site in step.layout.sites}
    with torch.no_grad(), no_trace(case.model), recorded_outputs(case.model, slots, slots) as outputs:
        case.losses()
    found = {}
    for site in step.layout.sites:
        s = outputs[site.name].detach()
        found[site.name] = drawing.frame(site, s, site.gate_at(s))
    return found


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
    return {site.name: site.slot for site in layout_of(case, sites).sites}
