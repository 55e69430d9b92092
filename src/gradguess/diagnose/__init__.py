"""How good a guess is: bias, variance, covariance, cosine, and the spectrum of the Jacobian above, per site.

With `g_b` the gradient of the *mean* loss at sample `b`'s output (it carries 1/B) and `ĝ_b = c_b y_b` its estimate:

    bias               ‖ mean_b (Cov(y_b) - I) g_b ‖₂
    variance           ‖ mean_b E (g_b - ĝ_b)^∘2 - (mean_b (Cov(y_b) - I) g_b)^∘2 ‖₂
    covariance norm    mean_b ‖Cov(y_b) - I‖_F / d
    overlap            mean_b ‖V_k V_kᵀ g_b‖ / ‖g_b‖ over k, with V_k the top-k right singular vectors of W̃_b

The paper replaces the expectation in the variance by one draw per sample. Here it is exact: `c` and `y` are jointly
Gaussian, so that, element by element,

    E ĝ   = Cov(y) g
    E ĝ^2 = diag Cov(y) · E c² + 2 (Cov(y) g)^2,      E c² = Σ_j g_jᵀ Cov(y_j) g_j over ALL sites j.

Methods that draw no directions at sites (backpropagation, learned feedback) have no covariance. Their bias and variance
come from `draws` estimates, corrected for the noise of so few.
"""

from gradguess.diagnose.diagnose import diagnose
from gradguess.diagnose.report import Report, SiteReport

__all__ = ["Report", "SiteReport", "diagnose"]
