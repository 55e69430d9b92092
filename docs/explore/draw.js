// Drawings: each function returns the SVG of one picture, for a box of a width and a height in pixels.

const METHODS = {
  backprop: { label: "Backpropagation", dash: "" },
  weight: {
    label: "Weight perturbation", dash: "9 3 2 3",
    note: "Y ~ N(0, I) on all weights and biases at once. Unbiased and the noisiest: one measured number for all " +
      "parameters. Here g is ∂L/∂W of the layer, since that is what it estimates.",
  },
  activation: {
    label: "Activation perturbation", dash: "2 3",
    note: "y ~ N(0, I) on the outputs of the layer. Unbiased; its noise grows with the width.",
  },
  wt: {
    label: "Wᵀ", dash: "6 3",
    note: "y = W̃ᵀ ε, noise pulled back through the next layer, so that y lies where a gradient can lie. Cov(y) = W̃ᵀW̃: " +
      "strong directions count more, which is a bias.",
  },
  wperp: {
    label: "W⊥", dash: "",
    note: "y = V<sub>k</sub> z, with V<sub>k</sub> the k strongest right singular directions of W̃, all weighed the same. Cov(y) = V<sub>k</sub>V<sub>k</sub>ᵀ: " +
      "the noise is that of k dimensions, whatever the width.",
  },
  wp: {
    label: "Wᴾ", dash: "4 2 1 2",
    note: "W̃ preconditioned until all its directions weigh the same: no bias where W̃ has as many rows as columns, and " +
      "the noise of all its dimensions.",
  },
};

const shown = (x) => (Math.abs(x) < 1e-12 ? "0" : Math.abs(x) < 0.001 || Math.abs(x) >= 1e5 ? x.toExponential(1) : x.toPrecision(3));
const svgOf = (width, height, body) => `<svg viewBox="0 0 ${width} ${height}" aria-hidden="true">${body}</svg>`;
const line = (x1, y1, x2, y2, kind) => `<line x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}" class="${kind}"/>`;
const words = (x, y, text, anchor = "middle", more = "") =>
  `<text x="${x}" y="${y}" text-anchor="${anchor}" ${more}>${text}</text>`;
const swatch = (name) =>
  `<svg class="swatch" width="26" height="10" aria-hidden="true"><line x1="0" y1="5" x2="26" y2="5" ` +
  `stroke="var(--${name})" stroke-width="3" stroke-dasharray="${METHODS[name].dash}"/></svg>`;

/** The estimates in the plane of g (across) and of the cloud's widest direction (up). */
function drawCloud(width, height, view, method) {
  const left = 34, bottom = 36, w = width - left - 4, h = height - bottom - 4, aspect = w / h;
  const reach = [...view.points.map(([x, y]) => Math.max(Math.abs(x) / aspect, Math.abs(y))), 1.3 / aspect];
  const wanted = Math.max(1.3 / aspect, reach.sort((a, b) => a - b)[Math.floor(0.97 * (reach.length - 1))]);
  const ladder = [1.3, 2.2, 3.3, 4.5, 7, 11, 16, 23, 35, 55, 80, 110, 160];
  const R = ladder.find((r) => r >= wanted) ?? wanted;
  const X = (x) => left + w / 2 + (x * h) / (2 * R), Y = (y) => 4 + h / 2 - (y * h) / (2 * R);
  const step = [0.5, 1, 2, 5, 10, 20, 50].find((s) => R / s <= 3.2) ?? 100;
  let body = `<clipPath id="inside"><rect x="${left}" y="4" width="${w}" height="${h}"/></clipPath>`;
  for (let tick = -Math.floor((R * aspect) / step) * step; tick <= R * aspect; tick += step) {
    body += line(X(tick), 4, X(tick), 4 + h, tick === 0 ? "axis" : "grid") + words(X(tick), h + 20, tick);
    if (Math.abs(tick) <= R) {
      body += line(left, Y(tick), left + w, Y(tick), tick === 0 ? "axis" : "grid");
      body += words(left - 6, Y(tick) + 4, tick, "end");
    }
  }
  const dots = view.points.map(([x, y]) => `M${X(x).toFixed(1)} ${Y(y).toFixed(1)}h0`).join("");
  body += `<g clip-path="url(#inside)"><path d="${dots}" stroke="var(--${method})" stroke-width="5" opacity=".45" stroke-linecap="round"/></g>`;
  const tip = X(1), back = Math.min(9, (tip - X(0)) * 0.6);
  body += `<path d="M${X(0)} ${Y(0)}H${tip - back / 2}" stroke="var(--ink)" stroke-width="3"/>` +
    `<path d="M${tip} ${Y(0)}l${-back} ${-0.6 * back}v${1.2 * back}z" fill="var(--ink)"/>`;
  const [ex, ey] = view.exact.map((v, i) => (i ? Y(v) : X(v))), [mx, my] = view.mean.map((v, i) => (i ? Y(v) : X(v)));
  const diamond = `<path d="M${ex} ${ey - 9}l9 9l-9 9l-9-9z" fill="none"`;
  body += `${diamond} stroke="var(--ground)" stroke-width="6"/>${diamond} stroke="var(--${method})" stroke-width="3"/>`;
  body += `<path d="M${mx - 6} ${my}h12M${mx} ${my - 6}v12" stroke="var(--ground)" stroke-width="5"/>` +
    `<path d="M${mx - 5} ${my}h10M${mx} ${my - 5}v10" stroke="var(--ink)" stroke-width="2"/>`;
  body += words(left + w / 2, height - 4, "along g") + words(10, 4 + h / 2, "across g", "middle", `transform="rotate(-90 10 ${4 + h / 2})"`);
  return svgOf(width, height, body);
}

/** Singular values as bars, the part of g in the first directions as a line. */
function drawSpace(width, height, { values, curve }, guessedAlong, method) {
  const left = 34, w = width - left - 4, h = height - 44, slot = w / values.length;
  const Y = (y) => 8 + h * (1 - y), middle = (j) => left + (j + 0.5) * slot;
  let body = "";
  for (const tick of [0, 0.5, 1]) body += line(left, Y(tick), left + w, Y(tick), "grid") + words(left - 6, Y(tick) + 4, tick, "end");
  values.forEach((value, j) => {
    const y = value / values[0], colour = guessedAlong(j) ? `var(--${method})` : "var(--line)";
    body += `<rect x="${left + (j + 0.12) * slot}" y="${Y(y)}" width="${0.76 * slot}" height="${h * y}" fill="${colour}" stroke="var(--strong)" stroke-width=".5"/>`;
  });
  const every = Math.ceil(values.length / 16);
  values.forEach((_, j) => (body += j % every === 0 ? words(middle(j), h + 24, j + 1) : ""));
  body += `<polyline points="${curve.map((y, j) => `${middle(j)},${Y(y)}`).join(" ")}" fill="none" stroke="var(--ink)" stroke-width="2"/>`;
  body += curve.map((y, j) => `<circle cx="${middle(j)}" cy="${Y(y)}" r="${slot > 12 ? 3.5 : 2}" fill="var(--ink)"/>`).join("");
  return svgOf(width, height, body + words(left + w / 2, height - 4, "singular direction of W̃"));
}

/** The data in the plane, with a ring around one sample. The marks differ by shape too. */
function drawPlane(width, height, { inputs, targets }, chosen) {
  const scale = Math.min(width, height) / 4.8, X = (x) => width / 2 + x * scale, Y = (y) => height / 2 - y * scale;
  const marks = [
    (x, y) => `<circle cx="${x}" cy="${y}" r="4" fill="var(--activation)"/>`,
    (x, y) => `<path d="M${x} ${y - 5}l5 9h-10z" fill="var(--wperp)"/>`,
    (x, y) => `<rect x="${x - 3.5}" y="${y - 3.5}" width="7" height="7" fill="var(--wt)"/>`,
  ];
  const body = inputs.map(([x, y], b) => marks[targets[b]](X(x), Y(y))).join("");
  const [x, y] = inputs[chosen];
  return svgOf(width, height, body + `<circle cx="${X(x)}" cy="${Y(y)}" r="9" fill="none" stroke="var(--ink)" stroke-width="2.5"/>`);
}

/** Loss curves over steps, on a logarithmic scale. `histories`: name -> losses. */
function drawCurves(width, height, histories) {
  const left = 44, bottom = 36, w = width - left - 8, h = height - bottom - 8, low = Math.log(0.003), high = Math.log(3);
  const steps = Math.max(...Object.values(histories).map((losses) => losses.length));
  const last = [50, 100, 200, 300, 400, 600, 800, 1000].find((s) => s >= steps) ?? steps;
  const X = (i) => left + (w * i) / last, Y = (loss) => 8 + h * (1 - (Math.max(Math.log(loss), low) - low) / (high - low));
  let body = "";
  for (const tick of [0.003, 0.01, 0.03, 0.1, 0.3, 1, 3]) {
    body += line(left, Y(tick), left + w, Y(tick), "grid") + words(left - 6, Y(tick) + 4, tick, "end");
  }
  for (let i = 0; i <= 4; i++) body += words(X((last * i) / 4), h + 24, Math.round((last * i) / 4), i === 4 ? "end" : "middle");
  for (const [name, losses] of Object.entries(histories)) {
    const points = losses.map((loss, i) => `${X(i).toFixed(1)},${Y(loss).toFixed(1)}`).join(" ");
    body += `<polyline points="${points}" fill="none" stroke="var(--${name})" stroke-width="2.5" stroke-dasharray="${METHODS[name].dash}"/>`;
    if (losses.length === 1) body += `<circle cx="${X(0)}" cy="${Y(losses[0])}" r="4" fill="var(--${name})"/>`;
  }
  return svgOf(width, height, body + words(left + w / 2, height - 4, "steps"));
}
