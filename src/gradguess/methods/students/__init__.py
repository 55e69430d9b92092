"""Students: small networks that stand for all that lies above a cut of the model.

The model is cut into pieces (`sites=n`). Every cut has a student `S_i`, from the cut's output to the model's outputs.
The gradient at the cut is pulled back through the student instead of through the model above:

    signal "loss"     h_i = ∇_s loss(S_i(s_i), t)     a local loss, which needs nothing from above
    signal "error"    h_i = J_{S_i}(s_i)ᵀ e           the output error e is exact

Inside a piece gradients are exact.

Related: decoupled greedy learning (Belilovsky et al. 2019), synthetic gradients (Jaderberg et al. 2017), local losses
(Nøkland and Eidnes 2019), Sobolev training (Czarnecki et al. 2017), local gradient guesses (Fournier et al. 2023).
"""

from gradguess.methods.students.students import LocalGuess, Students

__all__ = ["LocalGuess", "Students"]
