// The first section: controls, pictures and numbers of one guessed gradient.

const COUNT = 300; // estimates in the cloud
const DATA = spirals(24, 7);
const find = (id) => document.getElementById(id);
const number = (id) => Number(find(id).value);
const picked = (name) => document.querySelector(`input[name=${name}]:checked`).value;

/** Draw into a box at its real size, now and whenever the size changes. */
function picture(id, drawing) {
  const box = find(id);
  const render = () => (box.innerHTML = drawing(Math.max(box.clientWidth, 240), box.clientHeight));
  new ResizeObserver(render).observe(box);
  return render;
}

/** Say something to a screen reader once the numbers have come to rest. */
function teller(id) {
  let timer = 0;
  return (text) => {
    clearTimeout(timer);
    timer = setTimeout(() => (find(id).textContent = text), 250);
  };
}

const guess = { seed: 1, view: null };
const tellGuess = teller("told");

function readGuess() {
  const site = Number(picked("layer")), width = number("width"), method = picked("method");
  const k = find("k");
  k.max = Math.min(width, site === 0 ? width : 3); // W̃ has no more singular directions
  k.disabled = method !== "wperp";
  for (const id of ["k", "width", "tangents", "sample", "trained"]) find(`${id}-value`).textContent = find(id).value;
  return {
    site, width, sample: number("sample"), trained: number("trained"),
    options: { method, k: number("k"), tangents: number("tangents"), isolate: !find("others").checked },
  };
}

const trained = new Map(); // `width/steps` -> network

/** The network after so many steps of backpropagation. */
function trainedNetwork(width, steps) {
  const key = `${width}/${steps}`;
  if (!trained.has(key)) {
    const runner = startRunner(makeNetwork([2, width, width, 3], 1));
    const options = { method: "backprop", rate: RATE };
    while (runner.steps < steps) trainStep(runner, DATA.inputs, DATA.targets, options);
    trained.set(key, runner.network);
  }
  return trained.get(key);
}

function computeGuess({ site, width, sample, trained, options }) {
  const network = trainedNetwork(width, trained);
  const seen = forward(network, DATA.inputs[sample], DATA.targets[sample]);
  const g = truth(network, seen, site, options);
  const estimates = cloudOf(network, seen, site, options, COUNT, whiteNoise(guess.seed));
  const exact = exactMoments(network, seen, site, options), measured = measuredMoments(estimates, g);
  const flat = flatten(estimates, g, measured.mean);
  const W = jacobianAbove(network, seen, site), space = overlap(W, trueGradients(network, seen)[site]);
  const rank = space.values.filter((value) => value > space.values[0] * 1e-12).length;
  const parameters = [network.weights, network.biases].flat(Infinity).length;
  const dimensions = { weight: parameters, activation: width, wt: rank, wperp: Math.min(options.k, rank), wp: W.length < width ? rank : width };
  return {
    site, width, sample, options, exact, measured, space, rank,
    dimensions: dimensions[options.method], of: options.method === "weight" ? parameters : width,
    cloud: { points: flat.points, exact: flat.place(exact.mean), mean: flat.place(measured.mean) },
  };
}

function updateGuess() {
  const view = (guess.view = computeGuess(readGuess())), { exact, measured, options } = view;
  const label = METHODS[options.method].label, share = (bias) => `${shown(bias)}<small>${Math.round((100 * bias) / exact.length)} %</small>`;
  document.documentElement.style.setProperty("--method", `var(--${options.method})`);
  find("method-note").innerHTML = METHODS[options.method].note;
  const rows = [
    ["bias", "‖E ĝ − g‖, and over ‖g‖", share(exact.bias), share(measured.bias)],
    ["variance", "‖Var ĝ‖", shown(exact.variance), shown(measured.variance)],
    ["noise over signal", "√(Σ Var ĝ) / ‖g‖", shown(exact.noise), shown(measured.noise)],
    ["cosine of the mean", "of E ĝ with g", shown(exact.cosine), shown(measured.cosine)],
    ["cosine of one estimate", "of ĝ with g, on average", "–", shown(measured.single)],
    ["true gradient", "‖g‖", shown(exact.length), ""],
    ["guessing space", "dimensions", `${view.dimensions} of ${view.of}`, ""],
  ];
  find("numbers").innerHTML = rows
    .map(([name, what, ...cells]) => `<tr><th scope="row">${name}<small>${what}</small></th>${cells.map((c) => `<td>${c}</td>`).join("")}</tr>`)
    .join("");
  find("chain").innerHTML = ["x", "s₁ = W₁x + b₁", "ReLU", "s₂ = W₂x + b₂", "ReLU", "s₃ = W₃x + b₃", "loss L"]
    .map((text, i) => `<li${i === 1 + 2 * view.site ? ' aria-current="true"' : ""}><span>${text}</span></li>`)
    .join("");
  const moments = `bias ${shown(exact.bias)}, ${Math.round((100 * exact.bias) / exact.length)} % of the gradient's length; ` +
    `variance ${shown(exact.variance)}; cosine of the mean with the gradient ${shown(exact.cosine)}; ` +
    `of one estimate ${shown(measured.single)} on average`;
  tellGuess(`${label} guesses in ${view.dimensions} of ${view.of} dimensions: ${moments}.`);
  find("cloud-words").textContent = `${COUNT} estimates by ${label}. In units of the gradient's length, their mean lies ` +
    `${shown(view.cloud.mean[0])} along the gradient and ${shown(view.cloud.mean[1])} across it (exact: ` +
    `${view.cloud.exact.map(shown).join(" and ")}; a perfect estimate: 1 and 0). They scatter by ${shown(measured.noise)}.`;
  find("space-words").textContent = `The Jacobian has rank ${view.rank}. Its singular values are ` +
    `${view.space.values.map(shown).join(", ")}. The part of the gradient in the first directions is ` +
    `${view.space.curve.map((y) => y.toFixed(2)).join(", ")}.`;
  [renderCloud, renderSpace, renderPlane].forEach((render) => render());
}

const inSpace = (j) => guess.view.options.method !== "wperp" || j < guess.view.options.k;

find("methods").insertAdjacentHTML("beforeend", Object.entries(METHODS)
  .filter(([name]) => name !== "backprop")
  .map(([name, { label }]) => `<label><input type="radio" name="method" value="${name}"${name === "wperp" ? " checked" : ""}> ${swatch(name)} ${label}</label>`)
  .join(""));
const renderCloud = picture("cloud", (w, h) => drawCloud(w, h, guess.view.cloud, guess.view.options.method));
const renderSpace = picture("space", (w, h) =>
  drawSpace(w, h, guess.view.space, (j) => inSpace(j) && j < guess.view.rank, guess.view.options.method));
const renderPlane = picture("plane", (w, h) => drawPlane(w, h, DATA, guess.view.sample));
find("guess").addEventListener("input", updateGuess);
find("again").addEventListener("click", () => {
  guess.seed += 1;
  updateGuess();
});
updateGuess();
