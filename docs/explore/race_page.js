// The second section: the race.

const RACERS = ["backprop", "wperp", "wt", "activation", "weight"];
const LAST = 1000; // steps
const calm = matchMedia("(prefers-reduced-motion: reduce)"); // then the picture is drawn anew every 50 steps alone
const race = { running: false, steps: 0, runners: {}, histories: {}, accuracies: {} };
const tellRace = teller("race-told");

function resetRace() {
  pauseRace();
  const seed = number("race-seed"), width = number("race-width");
  find("race-k").max = width;
  for (const id of ["race-k", "race-width", "race-tangents", "race-seed"]) find(`${id}-value`).textContent = find(id).value;
  race.steps = 0;
  for (const name of RACERS) {
    race.runners[name] = { ...startRunner(makeNetwork([2, width, width, 3], seed)), noise: whiteNoise(1000 + seed) };
    race.histories[name] = [];
  }
  stepRace(); // the first step shows where all of them start
  showRace();
}

function stepRace() {
  const shared = { k: number("race-k"), tangents: number("race-tangents"), rate: RATE, isolate: false };
  for (const name of RACERS) {
    const runner = race.runners[name];
    const before = trainStep(runner, DATA.inputs, DATA.targets, { ...shared, method: name }, runner.noise);
    race.histories[name].push(before.loss);
    race.accuracies[name] = before.accuracy;
  }
  race.steps += 1;
}

function showRace() {
  const loss = (name) => race.histories[name][race.steps - 1], percent = (name) => `${Math.round(100 * race.accuracies[name])} %`;
  find("race-steps").textContent = race.steps - 1;
  find("race-numbers").innerHTML = RACERS
    .map((name) => `<tr><th scope="row"><span class="name">${swatch(name)} ${METHODS[name].label}</span></th><td>${shown(loss(name))}</td><td>${percent(name)}</td></tr>`)
    .join("");
  if (!race.running) {
    tellRace(`After ${race.steps - 1} steps: ` + RACERS.map((name) => `${METHODS[name].label} loss ${shown(loss(name))}`).join("; ") + ".");
  }
  renderCurves();
}

function runRace() {
  if (!race.running) return;
  const started = performance.now();
  let show = !calm.matches;
  do {
    stepRace();
    show ||= race.steps % 50 === 1;
  } while (performance.now() - started < 12 && race.steps <= LAST);
  if (race.steps > LAST) pauseRace();
  if (show || !race.running) showRace();
  requestAnimationFrame(runRace);
}

function pauseRace() {
  race.running = false;
  find("start").textContent = "Start";
}

const renderCurves = picture("curves", (w, h) => drawCurves(w, h, race.histories));
find("start").addEventListener("click", () => {
  if (race.running) {
    pauseRace();
    showRace();
  } else if (race.steps <= LAST) {
    race.running = true;
    find("start").textContent = "Pause";
    requestAnimationFrame(runRace);
  }
});
find("step").addEventListener("click", () => {
  pauseRace();
  if (race.steps <= LAST) stepRace();
  showRace();
});
find("reset").addEventListener("click", resetRace);
find("race").addEventListener("input", resetRace);
resetRace();

// What the tests compare with the Python library.
window.gradguess = {
  svd, gramSchmidt, forward, framesOf, guessed, weightPerturbed, estimateGradient, exactMoments, cloudOf, measuredMoments,
  overlap, jacobianAbove, trueGradients, truth, startRunner, trainStep, guess, race,
};
