// A network is { weights: [W_1, …], biases: [b_1, …] }: linear layers with ReLUs between them, and cross-entropy.

/** Numbers between 0 and 1 from a seed (mulberry32). */
function uniform(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t = (t + Math.imul(t ^ (t >>> 7), t | 61)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** White noise: a function that returns the next number of N(0, 1) (Box and Muller). */
function whiteNoise(seed) {
  const random = uniform(seed);
  let spare = null;
  return () => {
    if (spare !== null) {
      const z = spare;
      spare = null;
      return z;
    }
    const radius = Math.sqrt(-2 * Math.log(1 - random())), angle = 2 * Math.PI * random();
    spare = radius * Math.sin(angle);
    return radius * Math.cos(angle);
  };
}

const draw = (noise, n) => Array.from({ length: n }, noise);

function makeNetwork(sizes, seed) {
  const noise = whiteNoise(seed), weights = [], biases = [];
  for (let i = 0; i + 1 < sizes.length; i++) {
    const rows = Array.from({ length: sizes[i + 1] }, () => draw(noise, sizes[i]));
    weights.push(rows.map((row) => times(Math.sqrt(2 / sizes[i]), row)));
    biases.push(times(i + 2 < sizes.length ? 0.3 : 0, draw(noise, sizes[i + 1])));
  }
  return { weights, biases };
}

/** Three arms of a spiral in the plane: a class each. */
function spirals(perArm, seed) {
  const noise = whiteNoise(seed), inputs = [], targets = [];
  for (let i = 0; i < 3 * perArm; i++) {
    const arm = i % 3, along = (Math.floor(i / 3) + 0.5) / perArm;
    const radius = 0.3 + 1.7 * along, angle = (2 * Math.PI * arm) / 3 + 4 * along;
    inputs.push([radius * Math.cos(angle) + 0.08 * noise(), radius * Math.sin(angle) + 0.08 * noise()]);
    targets.push(arm);
  }
  return { inputs, targets };
}

/** One sample through the network: the inputs x_i and outputs s_i of all layers, the gates D_i, loss and error e. */
function forward(network, input, target) {
  const xs = [input], ss = [], gates = [];
  network.weights.forEach((W, i) => {
    const s = multiply(W, xs[i]);
    addTo(s, 1, network.biases[i]);
    ss.push(s);
    gates.push(s.map((value) => Number(value > 0)));
    xs.push(s.map((value) => Math.max(value, 0)));
  });
  const outputs = ss[ss.length - 1], top = Math.max(...outputs);
  const powers = outputs.map((value) => Math.exp(value - top));
  const total = powers.reduce((sum, value) => sum + value, 0);
  const loss = Math.log(total) + top - outputs[target];
  const error = powers.map((value, j) => value / total - Number(j === target));
  return { xs, ss, gates, loss, error, right: outputs[target] === top };
}

/** W̃ = W_{i+1} D_i: the Jacobian from s_i to s_{i+1}. */
const jacobianAbove = (network, seen, i) =>
  network.weights[i + 1].map((row) => row.map((w, j) => w * seen.gates[i][j]));

/** The true gradients g_i = ∂L/∂s_i of one sample, by backpropagation. */
function trueGradients(network, seen) {
  const gs = [seen.error];
  for (let i = network.weights.length - 2; i >= 0; i--) {
    const below = multiplyTransposed(network.weights[i + 1], gs[0]);
    gs.unshift(below.map((value, j) => value * seen.gates[i][j]));
  }
  return gs;
}

/** The derivative of the loss along directions y_i at all sites (null: none there), in one forward sweep. */
function derivativeAlong(network, seen, ys) {
  let t = ys[0] ?? zeros(seen.ss[0].length);
  for (let i = 1; i < network.weights.length; i++) {
    t = multiply(network.weights[i], t.map((value, j) => value * seen.gates[i - 1][j]));
    if (ys[i]) addTo(t, 1, ys[i]);
  }
  return dot(seen.error, t);
}
