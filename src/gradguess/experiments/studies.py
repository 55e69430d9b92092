"""Ways of teaching feedback that exist to be compared with the library's own: controls, ceilings and rival rules.

`learn` says what teaches the feedback matrices `B`:

- "weighted": the tangents of the outputs, weighted. This is what `gg.Feedback` does by itself.
- "outputs": the same tangents without the weights.
- "loss": the derivative of the loss alone, one number per sample.
- "momentum": a running mean of raw estimates, the rule of FDFA.
- "truth": the true gradient, which shows the ceiling of a form.
- "never": nothing. `B` stays as it started, unless `bootstrap` draws it to the chained estimate.

`start` is "zero", or "random"; random matrices that never learn are direct feedback alignment.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import gradguess as gg

Form = Literal["direct", "chained", "corrected"]
Learn = Literal["weighted", "outputs", "loss", "momentum", "truth", "never"]
Start = Literal["zero", "random"]


def studied_feedback(guess: gg.Guess, *, form: Form, learn: str, start: str, **options: Any) -> gg.Feedback:
    """Feedback around `guess` that learns as a study asks; `options` are the other arguments of `gg.Feedback`."""
    return gg.Feedback(guess, form=form, learn=cast(Learn, learn), start=cast(Start, start), **options)
