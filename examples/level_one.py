"""Train privately in one call, on data that comes with scikit-learn.  python
examples/level_one.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import dpfy
from dpfy.training import Update

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16  # the range 0..16 is public knowledge
y = torch.tensor(digits.target)
train, test = (x[:1500], y[:1500]), (x[1500:], y[1500:])

recipe = dpfy.dpsgd(records=1500, batch_size=500, epochs=60, clip_norm=1.0)
plan = recipe.calibrate(epsilon=3.0, delta=1e-4)

model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
result = dpfy.fit(
    model,
    train,
    plan=plan,
    optimizer=optimizer,
    evaluation=dpfy.PublicTest(test),
    update=Update(average=0.9),
)

print(f"accuracy {result.utility['test_accuracy']:.1%}")
print(result.guarantee.sentence(plan.delta))
print(f"check it: dpfy verify {result.run}")
