"""Your own loop, your own model, any torch optimizer.  python examples/level_two.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import dpfy

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)

plan = dpfy.dpsgd(records=1500, batch_size=250, epochs=30).calibrate(epsilon=8.0, delta=1e-4)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

with dpfy.PrivateTraining(model, optimizer, (x[:1500], y[:1500]), plan) as training:
    print(training.engine_reason)
    for (
        features,
        targets,
    ) in training.batches():  # physical batches; padding and accumulation are handled inside
        losses = functional.cross_entropy(
            model(features), targets, reduction="none"
        )  # one loss per example
        training.step(losses)  # clip, sum; at the end of the logical batch noise and optimizer.step
    print(training.guarantee().sentence(plan.delta))

accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
print(f"accuracy {accuracy:.1%}; run folder {training.folder.path}")
