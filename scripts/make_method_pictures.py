"""Draw the picture of every method for `docs/methods`, into `docs/figures/methods`.

Run after a change of a guess, a colour or a drawing: `python scripts/make_method_pictures.py`. A test makes them again
and compares. Clouds, covariances and influences come from the library itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from method_pictures.influence import of_rules
from method_pictures.panels import bars_panel, legend, plane_panel
from method_pictures.samples import K, Plane, along_a_student, corrected, guessed, perturbed
from method_pictures.schematics import schematics
from method_pictures.svg import Picture, colour_of

import gradguess as gg
from gradguess.guesses import Guess

FOLDER = Path(__file__).parents[1] / "docs" / "figures" / "methods"


GUESSES: dict[str, tuple[Callable[[int], Guess], str]] = {  # by their k
    "activation": (lambda k: gg.ActivationPerturbation(), "Activation perturbation guesses all directions alike"),
    "wt": (lambda k: gg.WTranspose(), "Wᵀ guesses directions as strongly as W̃ passes them, squared"),
    "wperp": (lambda k: gg.WPerp(k, solver="svd"), "W⊥ guesses the k strongest directions alike"),
    "wperp-bottom": (lambda k: gg.WPerp(k, end="bottom"), "W⊥-bottom guesses where no gradient lies"),
    "wperp-ns": (lambda k: gg.WPerpNS(k), "W⊥-NS guesses almost as W⊥ does"),
    "wp": (lambda k: gg.WPreconditioned(), "Wᴾ guesses all directions alike where W̃ is square"),
}
WEIGHTS: dict[str, tuple[gg.WeightPerturbation | gg.baselines.MeZO, str]] = {
    "weight": (gg.WeightPerturbation(), "Weight perturbation"),
    "mezo": (gg.baselines.MeZO(), "MeZO"),
}


def of_guess(name: str) -> Picture:
    """The plane of a site with two units, and the directions of one with eight."""
    guess, words = GUESSES[name]
    picture, colour = Picture(720, 330, words), colour_of(name)
    plane_panel(picture, guessed(guess(1)), colour, 0, "A site with 2 units")
    bars_panel(picture, guess(K), colour, 380, "8 units, 3 of them off: what is guessed")
    legend(picture, colour)
    return picture


def of_weights(name: str) -> Picture:
    method, words = WEIGHTS[name]
    picture = Picture(720, 330, f"{words}: the cloud around the gradient grows with the parameters")
    for left, count, title in ((0, 2, "A model with 2 parameters"), (380, 10, "2 of a model's 10 parameters")):
        plane_panel(picture, perturbed(method, count), colour_of(name), left, title, (0.42, 0.55), 38)
    legend(picture, colour_of(name))
    return picture


def of_planes(name: str, planes: dict[str, Plane], words: str, dot: float = 5) -> Picture:
    """Two planes beside each other, by their titles."""
    picture, colour = Picture(720, 330, words), colour_of(name)
    for left, (title, plane) in zip((0, 380), planes.items(), strict=True):
        plane_panel(picture, plane, colour, left, title, (0.3, 0.66), dot=dot)
    legend(picture, colour)
    return picture


def of_solvers() -> Picture:
    """The solvers of W⊥ on the same samples."""
    words = "W⊥ by its three solvers: svd and subspace agree, the shared basis is another subspace"
    picture, colour = Picture(720, 300, words), colour_of("wperp")
    for left, solver in ((0, "svd"), (245, "subspace"), (490, "shared")):
        bars_panel(picture, gg.WPerp(K, solver=solver), colour, left, f'solver="{solver}"', 1.1, 25)
    return picture


def made() -> dict[str, Picture]:
    """Every picture, by the name of its file."""
    near, far = "A student that points near the gradient", "A student that points elsewhere"
    students = {near: along_a_student(0.35), far: along_a_student(1.2)}
    lessons = {"Nothing learned: the guess alone": corrected(0), "After 3 lessons: around the prediction": corrected(3)}
    local = "A local guess: the estimate is the projection of the gradient on what a student says"
    shrinks = "Feedback, corrected: the cloud shrinks as the prediction learns"
    return {
        **{name: of_weights(name) for name in WEIGHTS},
        **{name: of_guess(name) for name in GUESSES},
        "wperp-solvers": of_solvers(),
        "local-guess": of_planes("local-guess", students, local, dot=10),
        "feedback-corrected": of_planes("feedback-corrected", lessons, shrinks),
        **schematics(),
        "online-rules": of_rules(),
    }


def pictures() -> dict[str, str]:
    """Every picture as text, by the name of its file."""
    with torch.random.fork_rng():  # layers draw weights when they are made, which are then replaced
        return {name: picture.svg() for name, picture in made().items()}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / f"{name}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
