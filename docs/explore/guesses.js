// A frame is the map A from white noise z to a direction y = A z, as the list of its columns. Cov(y) = A Aᵀ.
// `columns` is null where A is the identity.

const FRAMES = {
  activation: (W, k, d) => identity(d),
  wt: (W) => ({ columns: W, latent: W.length, orthonormal: false }),
  wperp: (W, k) => orthonormalFrame(svd(W).vectors.slice(0, k)),
  wp: (W, k, d) => (W.length >= d ? identity(d) : orthonormalFrame(gramSchmidt(W))),
};

const identity = (d) => ({ columns: null, latent: d, orthonormal: false });
const orthonormalFrame = (columns) => ({ columns, latent: columns.length, orthonormal: true });

/** The frames of one sample at all sites. At the last layer every method draws N(0, I). */
function framesOf(network, seen, options) {
  const last = network.weights.length - 1;
  return seen.ss.map((s, i) => {
    if (i === last) return identity(s.length);
    return FRAMES[options.method](jacobianAbove(network, seen, i), options.k, s.length);
  });
}

/** A z. */
const applyFrame = (frame, z) => (frame.columns ? multiplyTransposed(frame.columns, z) : z.slice());

/** Aᵀ v. */
const applyAdjoint = (frame, v) => (frame.columns ? multiply(frame.columns, v) : v.slice());

/** Cov(y) v. */
const covarianceTimes = (frame, v) => applyFrame(frame, applyAdjoint(frame, v));

/** diag Cov(y). */
function variancesOf(frame, d) {
  if (!frame.columns) return new Array(d).fill(1);
  const total = zeros(d);
  for (const column of frame.columns) column.forEach((x, j) => (total[j] += x * x));
  return total;
}

/** Independent draws become orthonormal ones, √k long, in blocks of k: the same covariance, never worse. */
function spread(draws) {
  const k = draws[0].length, out = [];
  for (let start = 0; start < draws.length; start += k) out.push(...gramSchmidt(draws.slice(start, start + k)));
  return out.map((q) => times(Math.sqrt(k), q));
}

/**
 * Estimates of one batch by a guess: ĝ_i = (∇L · y) y_i at every site, averaged over the tangents.
 * Noise is drawn site by site, in it tangent by tangent, in it sample by sample, as the Python library does.
 * With `isolate` every site is measured for itself.
 */
function guessed(network, batch, options, noise) {
  const known = new Map(); // samples with the same open units have the same frames
  const frames = batch.map((seen) => {
    const key = seen.gates.join();
    if (!known.has(key)) known.set(key, framesOf(network, seen, options));
    return known.get(key);
  });
  const sites = network.weights.length;
  const tangents = [...Array(options.tangents).keys()];
  const white = frames[0].map((_, i) => tangents.map(() => frames.map((own) => draw(noise, own[i].latent))));
  return batch.map((seen, b) => {
    const ys = frames[b].map((frame, i) => {
      const zs = tangents.map((t) => white[i][t][b]);
      return (frame.orthonormal && zs.length > 1 ? spread(zs) : zs).map((z) => applyFrame(frame, z));
    });
    const estimates = seen.ss.map((s) => zeros(s.length)), derivatives = [];
    for (const t of tangents) {
      const along = (chosen) => derivativeAlong(network, seen, ys.map((y, i) => (chosen(i) ? y[t] : null)));
      const together = options.isolate ? null : along(() => true);
      for (let i = 0; i < sites; i++) {
        const c = options.isolate ? along((other) => other === i) : together;
        derivatives.push(c);
        addTo(estimates[i], c / options.tangents, ys[i][t]);
      }
    }
    return { directions: ys, derivatives, estimates };
  });
}

/** Noise on all parameters, one direction for the batch: its estimate of the gradient of the mean loss. */
function weightPerturbed(network, batch, options, noise) {
  const gradient = zeroGradient(network), directions = [];
  for (let tangent = 0; tangent < options.tangents; tangent++) {
    const Y = { weights: [], biases: [] };
    network.weights.forEach((W, i) => {
      Y.weights.push(W.map((row) => draw(noise, row.length)));
      Y.biases.push(draw(noise, network.biases[i].length));
    });
    let c = 0;
    for (const seen of batch) {
      const ys = Y.weights.map((matrix, i) => multiply(matrix, seen.xs[i]).map((value, j) => value + Y.biases[i][j]));
      c += derivativeAlong(network, seen, ys) / batch.length;
    }
    addParameters(gradient, c / options.tangents, Y);
    directions.push(Y);
  }
  return { gradient, directions };
}

const zeroGradient = (network) => ({
  weights: network.weights.map((W) => W.map((row) => zeros(row.length))),
  biases: network.biases.map((b) => zeros(b.length)),
});

/** a += factor * b, for all parameters. */
function addParameters(a, factor, b) {
  a.weights.forEach((W, i) => W.forEach((row, j) => addTo(row, factor, b.weights[i][j])));
  a.biases.forEach((row, i) => addTo(row, factor, b.biases[i]));
}

/** The gradient of the mean loss from every sample's estimates at the sites: Σ_b ĝ_i x_iᵀ / B. */
function pullBack(network, batch, estimates) {
  const gradient = zeroGradient(network);
  batch.forEach((seen, b) => {
    estimates[b].forEach((g, i) => {
      gradient.weights[i].forEach((row, j) => addTo(row, g[j] / batch.length, seen.xs[i]));
      addTo(gradient.biases[i], 1 / batch.length, g);
    });
  });
  return gradient;
}

/** The gradient of the mean loss of a batch, as a method estimates it. */
function estimateGradient(network, batch, options, noise) {
  if (options.method === "weight") return weightPerturbed(network, batch, options, noise).gradient;
  if (options.method === "backprop") return pullBack(network, batch, batch.map((seen) => trueGradients(network, seen)));
  return pullBack(network, batch, guessed(network, batch, options, noise).map((sample) => sample.estimates));
}
