"""Synthetic passages in the manner of Shakespeare: a small model trained privately, samples of it,
and what it learnt by heart.

    python examples/synthetic_text.py --data-dir DATA      # DATA holds shakespeare/input.txt.gz; or
    set DPFY_DATA

A text is a passage of `--length` bytes and no byte is in two of them: one passage is protected, not
a scene or an author. Ten secrets are planted, to see whether they come out. What is printed about
copies and secrets is not private.
"""

from __future__ import annotations

import argparse
import json

import torch

import dpfy
from dpfy.data.config import DataConfig
from dpfy.data.records import Records
from dpfy.data.source import load
from dpfy.synthetic.text.copies import Canaries, copies
from dpfy.synthetic.text.tokens import ByteTokens, losses_of, rows_of


def passages(data_dir: str | None, length: int) -> tuple[list[str], list[str]]:
    """Passages to train on, and others."""
    data = load(DataConfig(kind="shakespeare", dir=data_dir, length=length - 1))

    def texts(records: Records) -> list[str]:
        inputs, targets = records.tensors
        rows = torch.cat([inputs, targets[:, -1:]], dim=1).tolist()
        return [bytes(row).decode("utf-8", "replace") for row in rows]

    return texts(data.train), texts(data.test)


def main(given: list[str] | None = None) -> None:
    """Train, sample, check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data-dir", help="folder that holds shakespeare/; default: the environment's DPFY_DATA"
    )
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--run", default="runs/shakespeare")
    asked = parser.parse_args(given)
    train, other = passages(asked.data_dir, asked.length)
    secrets = Canaries.made(10, seed=0)
    private = [*train, *secrets.texts]
    # of private texts state a public number instead
    made = dpfy.synthesize(
        dpfy.Texts(private, length=asked.length),
        epsilon=asked.epsilon,
        delta=1e-5,
        records=len(private),  # public here: the texts are made up
        rows=asked.texts,
        epochs=asked.epochs,
        device=asked.device,
        run=asked.run,
    )
    held_out = (
        losses_of(made.model.cpu(), rows_of(other[:500], ByteTokens(), asked.length), 256)
        .mean()
        .item()
    )
    print(json.dumps(made.texts[:3], indent=1))
    print(f"held-out loss {held_out:.3f} nats a byte")
    print(json.dumps(copies(made.texts, train, holdout=other).to_json(), indent=1))
    print(secrets.found(made.model, length=asked.length, delta=1e-5))
    print(made.report["statement"])
    print(f"check it: dpfy verify {made.run}")


if __name__ == "__main__":
    main()
