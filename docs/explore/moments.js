// How good an estimate is: bias, variance and cosine, from the covariance (exact) and from a cloud (measured).
// Weight perturbation estimates ∂L/∂W_i = g_i x_iᵀ, the other methods g_i = ∂L/∂s_i.

const cosine = (a, b) => dot(a, b) / (norm(a) * norm(b) || 1);
const outer = (a, b) => a.flatMap((x) => times(x, b));

/** What the methods try to find at a site: a vector. */
function truth(network, seen, site, options) {
  const g = trueGradients(network, seen)[site];
  return options.method === "weight" ? outer(g, seen.xs[site]) : g;
}

/** From the mean estimate and its variances to the numbers that are shown. */
function summary(g, mean, bias, variances) {
  return {
    length: norm(g),
    bias,
    variance: norm(variances),
    noise: Math.sqrt(variances.reduce((total, v) => total + v, 0)) / (norm(g) || 1),
    cosine: cosine(mean, g),
    mean,
    variances,
  };
}

/** The exact moments: E ĝ = Cov(y) g, and Var ĝ for Gaussian noise or orthonormal tangents. */
function exactMoments(network, seen, site, options) {
  const gs = trueGradients(network, seen), n = options.tangents;
  if (options.method === "weight") {
    const G = outer(gs[site], seen.xs[site]);
    let energy = 0; // the squared length of the gradient of all parameters
    gs.forEach((g, i) => (energy += dot(g, g) * (dot(seen.xs[i], seen.xs[i]) + 1)));
    return summary(G, G, 0, G.map((x) => (energy + x * x) / n));
  }
  const frames = framesOf(network, seen, options), g = gs[site], frame = frames[site];
  const mean = covarianceTimes(frame, g), diagonal = variancesOf(frame, g.length), own = dot(g, mean);
  let others = 0; // the noise that the other sites cause
  if (!options.isolate) gs.forEach((h, i) => (others += i === site ? 0 : dot(h, covarianceTimes(frames[i], h))));
  const [spherical, along] = frame.orthonormal && n > 1 ? orthonormalTangents(frame.latent, n) : [1 / n, 1 / n];
  const variances = diagonal.map((v, j) => v * (spherical * own + others / n) + along * mean[j] ** 2);
  return summary(g, mean, norm(minus(mean, g)), variances);
}

/**
 * For n orthonormal tangents in blocks of k the covariance of a site's own part is a |h|² Cov(y) + b (E ĝ)(E ĝ)ᵀ with
 * |h|² = gᵀ Cov(y) g: second moments of a random projector of rank r, whose (hᵀ P h) / |h|² is Beta(r/2, (k - r)/2).
 */
function orthonormalTangents(k, n) {
  let a = 0, b = 0;
  for (let start = 0; start < n; start += k) {
    const r = Math.min(k, n - start);
    if (r === k) continue; // a full block finds the whole projection: no noise
    const square = (r * (r + 2)) / (k * (k + 2)), across = (r / k - square) / (k - 1);
    a += (k / n) ** 2 * across;
    b += (k / n) ** 2 * (square - across - (r / k) ** 2);
  }
  return [a, b];
}

/** Many independent estimates at one site for one sample. */
function cloudOf(network, seen, site, options, count, noise) {
  if (options.method === "weight") {
    const once = () => weightPerturbed(network, [seen], options, noise).gradient.weights[site].flat();
    return Array.from({ length: count }, once);
  }
  return guessed(network, new Array(count).fill(seen), options, noise).map((copy) => copy.estimates[site]);
}

/** The same numbers from a cloud; the noise of its average is taken off the squared bias. */
function measuredMoments(estimates, g) {
  const count = estimates.length, mean = zeros(g.length), variances = zeros(g.length);
  for (const estimate of estimates) addTo(mean, 1 / count, estimate);
  for (const estimate of estimates) {
    estimate.forEach((x, j) => (variances[j] += (x - mean[j]) ** 2 / (count - 1)));
  }
  let squared = 0;
  mean.forEach((x, j) => (squared += (x - g[j]) ** 2 - variances[j] / count));
  const found = summary(g, mean, Math.sqrt(Math.max(squared, 0)), variances);
  found.single = estimates.reduce((total, estimate) => total + cosine(estimate, g), 0) / count;
  return found;
}

/** ‖V_j V_jᵀ g‖ / ‖g‖ for every j: how much of the gradient lies in the j strongest directions of W̃. */
function overlap(W, g) {
  const { values, vectors } = svd(W);
  let inside = 0;
  const curve = vectors.map((v) => Math.sqrt(Math.min(1, (inside += dot(v, g) ** 2) / dot(g, g))));
  return { values, curve };
}

/**
 * A cloud in the plane, in units of ‖g‖: the part along g, and the length of the part across g, so that distances from
 * g are true. The direction in which the cloud is widest across g says which side is up.
 */
function flatten(estimates, g, mean) {
  const unit = times(1 / norm(g), g);
  const across = (v) => {
    const rest = v.slice();
    addTo(rest, -dot(v, unit), unit);
    return rest;
  };
  const rests = estimates.map((estimate) => across(minus(estimate, mean)));
  let axis = rests.reduce((best, rest) => (norm(rest) > norm(best) ? rest : best), zeros(g.length));
  for (let step = 0; step < 12; step++) { // power iteration
    const next = zeros(g.length);
    for (const rest of rests) addTo(next, dot(rest, axis), rest);
    axis = times(1 / (norm(next) || 1), next);
  }
  const place = (v) => {
    const side = dot(v, axis) < 0 ? -1 : 1;
    return [dot(v, unit) / norm(g), (side * norm(across(v))) / norm(g)];
  };
  return { points: estimates.map(place), place };
}
