"""One gradient, estimated by hand and compared with backpropagation."""

import torch
from torch import nn

import gradguess as gg

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
inputs, targets = torch.randn(256, 40), torch.randint(10, (256,))
loss_fn = nn.CrossEntropyLoss(reduction="none")  # one loss per sample: each gets its own directional derivative

truth = gg.estimate(model, gg.Backprop(), loss_fn, inputs, targets)
for guess in (gg.WeightPerturbation(), gg.ActivationPerturbation(), gg.WTranspose(), gg.WPerp(k=10)):
    est = gg.estimate(model, guess, loss_fn, inputs, targets, generator=torch.Generator().manual_seed(0))
    a, b = est.grads["0.weight"].flatten(), truth.grads["0.weight"].flatten()
    print(f"{type(guess).__name__:24} cosine with the true gradient {torch.cosine_similarity(a, b, dim=0):+.3f}")

# what the estimate is made of: at each site a direction, its derivative, and their product
est = gg.estimate(model, gg.WPerp(k=10), loss_fn, inputs, targets)
product = est.jvp[0][:, None] * est.directions["0"][0]
print("estimate = derivative × direction:", torch.allclose(product, est.site_grads["0"]))
