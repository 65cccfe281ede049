"""Model, data and training of one client. Nothing here knows of privacy."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Two layers, for the 8 x 8 digits that scikit-learn brings along."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the ten digits."""
        return self.out(torch.relu(self.hidden(x)))


def digits() -> tuple[Tensor, Tensor]:
    """All images and labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def load_data(partition_id: int, num_partitions: int) -> DataLoader:
    """The examples of one client: every `num_partitions`-th of the first 1,500; the rest is the
    public test set.
    """
    images, labels = digits()
    mine = slice(partition_id, 1500, num_partitions)
    return DataLoader(TensorDataset(images[mine], labels[mine]), batch_size=32, shuffle=True)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Plain SGD; the mean loss."""
    optimizer, total, seen = torch.optim.SGD(net.parameters(), lr=lr), 0.0, 0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            total, seen = total + loss.item(), seen + 1
    return total / max(1, seen)


def test(net: nn.Module) -> float:
    """Accuracy on the public test set."""
    images, labels = digits()
    with torch.no_grad():
        return float((net(images[1500:]).argmax(1) == labels[1500:]).float().mean())
