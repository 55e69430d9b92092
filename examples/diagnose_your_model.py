"""How good would a guess be on your model? Bias, variance and cosine with the true gradient, site by site."""

import torch
from torch import nn

import gradguess as gg
from gradguess_lab.data import load

torch.manual_seed(0)
data = load("mnist1d")
inputs, targets = data.x_train[:256], data.y_train[:256]
model = nn.Sequential(  # put your own here
    nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
)
loss_fn = nn.CrossEntropyLoss(reduction="none")
for guess in (gg.ActivationPerturbation(), gg.WTranspose(), gg.WPerp(k=10)):
    report = gg.diagnose(model, guess, loss_fn, inputs, targets, generator=torch.Generator().manual_seed(0))
    print(guess)
    for name, site in report.items():
        print(f"  site {name:4} bias {site.bias:.2e}  variance {site.variance:.2e}  cosine {site.cosine:.3f}")
