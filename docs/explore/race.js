// Training: the same task, the same first weights and the same optimiser for every method.

const RATE = 0.005;
const ADAM = { beta1: 0.9, beta2: 0.999, eps: 1e-6 }; // with 1e-8 a gradient of mere rounding would move weights

const startRunner = (network) => ({ network, first: zeroGradient(network), second: zeroGradient(network), steps: 0 });

/** One step of Adam with the gradient that a method estimates; returns mean loss and accuracy before the step. */
function trainStep(runner, inputs, targets, options, noise) {
  const batch = inputs.map((input, b) => forward(runner.network, input, targets[b]));
  const gradient = estimateGradient(runner.network, batch, options, noise);
  runner.steps += 1;
  const { beta1, beta2, eps } = ADAM;
  const scale1 = 1 - beta1 ** runner.steps, scale2 = Math.sqrt(1 - beta2 ** runner.steps);
  const rowsOf = (tree) => [...tree.weights.flat(), ...tree.biases];
  const [first, second, moved] = [runner.first, runner.second, runner.network].map(rowsOf);
  rowsOf(gradient).forEach((row, i) => {
    row.forEach((g, j) => {
      first[i][j] = beta1 * first[i][j] + (1 - beta1) * g;
      second[i][j] = beta2 * second[i][j] + (1 - beta2) * g * g;
      moved[i][j] -= ((options.rate / scale1) * first[i][j]) / (Math.sqrt(second[i][j]) / scale2 + eps);
    });
  });
  return {
    loss: batch.reduce((total, seen) => total + seen.loss, 0) / batch.length,
    accuracy: batch.filter((seen) => seen.right).length / batch.length,
  };
}
