"""Learned feedback: directional derivatives teach a predictor of the gradient instead of being spent as updates.

For every site a matrix `B` predicts the gradient from the output error `e = dL/d(outputs)`, which is known after the
forward pass, and the site's gate `D`:

    prediction    h_i = D_i B_i e

`B_i` stands for the transposed Jacobian from the site to the outputs. A tangent pass measures that Jacobian: with
directions `y_i` injected, the outputs move by `u = Σ_i J_i y_i` and the loss by `c = <u, e>`. The predictor is fitted
to what it got wrong by least mean squares (`lesson`). How predictions `h` become the estimate `ĝ` is the form:

    direct       ĝ_i = h_i
    chained      ĝ_i = Σ_j W̃_ijᵀ h_j       over the sites j above, exact at the output: Wᵀ with what was learned in
                                           the place of its noise
    corrected    ĝ_i = h_i + r y_i         with the residual r = c - Σ_i <y_i, h_i>

With `memory="replay"` a pass keeps nothing of a layer: what the predictor explains of the outputs' tangents is summed
as the directions are carried. A second pass meets each site again with the same direction. There the site learns,
predicts, and pulls its estimate back to its parameters; with "chained" the last `sweeps` sites wait for the predictions
above them (`step/pull_back.py`).

Related: feedback matrices from forward gradients (Bacho and Chu 2024, FDFA), synthetic gradients (Jaderberg et al.
2017), directional gradients with a learned predictor (Silver et al. 2022).
"""

from gradguess.methods.feedback.feedback import Feedback

__all__ = ["Feedback"]
