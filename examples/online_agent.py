"""An agent that must remember: rewards come later, and each one is credited with the influence of its own step."""

import os

import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess_lab.streams.tasks import Corridors

fast = bool(os.environ.get("GRADGUESS_FAST"))
torch.manual_seed(0)
generator = torch.Generator().manual_seed(0)
maze = Corridors(streams=16, length=5, generator=generator)  # the side of the reward is shown at the start alone
model = gg.online.Recurrent(gg.online.LRU(4, 16), nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)))
optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
online = gg.online.Online(model, gg.online.RTRL())  # exact and cheap for an element-wise recurrence


def actor_critic(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Three logits and a value; the loss of each stream, given what it did and what that was worth."""
    action, worth = target
    log, value = output[:, :3].log_softmax(1), output[:, 3]
    surprise = worth - value
    entropy = -(log.exp() * log).sum(1)
    return -surprise.detach() * log.gather(1, action[:, None])[:, 0] + 0.5 * surprise**2 - 0.01 * entropy


waiting, ends = None, []
for _ in range(300 if fast else 10_000):
    online(None, maze.seen())  # a step without a loss
    if waiting is not None:
        held, action, reward, ended = waiting
        worth = reward + 0.99 * torch.where(ended, 0.0, online.output[:, 3])
        optimiser.zero_grad()
        held(actor_critic, (action, worth))  # the loss of the step before
        optimiser.step()
    held = online.later()
    action = torch.multinomial(online.output[:, :3].softmax(1), 1, generator=generator)[:, 0]
    reward, ended, found = maze.act(action)
    waiting = held, action, reward, ended
    online.reset(ended)  # an episode ends: the stream starts anew
    ends += found[ended].tolist()
print(f"{len(ends)} episodes, found the reward in {sum(ends[-400:]) / len(ends[-400:]):.2f} of the last ones")
