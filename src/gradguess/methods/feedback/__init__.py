"""Learned feedback: directional derivatives teach a predictor of the gradient instead of being spent as updates.

For every site a matrix `B` predicts the gradient from the output error `e = dL/d(outputs)`, which is known after the
forward pass, and the site's gate `D`:

    prediction    h_i = D_i B_i e

`B_i` stands for the transposed Jacobian from the site to the outputs. A tangent pass measures that Jacobian: with
directions `y_i` injected, the outputs move by `u = Σ_i J_i y_i` and the loss by `c = <u, e>`. The predictor is fitted
to what it got wrong by least mean squares (`lesson`). How predictions become the estimate is a form (`forms`).

    error       the output error e
    predictor   the matrices B
    lesson      one measurement, and what it teaches; rules: how much
    forward     the pass whose gradient is wanted
    forms       direct, chained, corrected
    replay      the same in two passes that keep nothing

Related: feedback matrices from forward gradients (Bacho and Chu 2024, FDFA), synthetic gradients (Jaderberg et al.
2017), directional gradients with a learned predictor (Silver et al. 2022).
"""

from gradguess.methods.feedback.feedback import Feedback

__all__ = ["Feedback"]
