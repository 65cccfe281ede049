"""Private vocabularies beside one learnt without privacy: bytes a token, and bits a byte of the same
small language model, trained for as many passes over the same text.

    python benchmarks/vocabularies.py --data-dir DATA --corpus sst2 --passes 4

SST-2 by phrase; Shakespeare by speaker, whose every tenth is held out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from dpfy.core.unit import user_unit
from dpfy.models.language import Block
from dpfy.runs.run import Run
from dpfy.text import tokenizer as vocabulary
from dpfy.text.claim import VocabularyClaim
from dpfy.text.corpus import DOCUMENT

LENGTH, WIDTH, BATCH, RATE = 64, 64, 32, 2e-3
Corpus = tuple[list[list[str]], list[str]]


def sst2(folder: Path) -> Corpus:
    """Phrases to learn from, each a unit, and sentences to measure on."""
    parts = []
    for name in ("train", "test"):
        packed = (folder / "sst2" / f"{name}.tsv.gz").read_bytes()
        lines = gzip.decompress(packed).decode().splitlines()[1:]
        parts.append([line.rsplit("\t", 1)[0] for line in lines])
    return [[text] for text in parts[0]], parts[1]


def shakespeare(folder: Path) -> Corpus:
    """The speeches of each speaker, and those of every tenth."""
    speeches = defaultdict(list)
    whole = gzip.decompress((folder / "shakespeare" / "input.txt.gz").read_bytes()).decode()
    for speech in whole.split("\n\n"):
        who, _, said = speech.partition(":\n")
        speeches[who].append(said)
    units = list(speeches.values())
    held = [text for unit in units[::10] for text in unit]
    return [unit for k, unit in enumerate(units) if k % 10], held


class LanguageModel(nn.Module):
    """Two blocks of a transformer with tied embeddings."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, WIDTH), nn.Embedding(LENGTH, WIDTH)
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.Sequential(Block(WIDTH, 4), Block(WIDTH, 4))
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the token after each position."""
        hidden = self.blocks(self.token(ids) + self.place.weight[: ids.shape[1]])
        logits: torch.Tensor = self.last(hidden) @ self.token.weight.T
        return logits


def rows(tokenizer: Any, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Windows of all texts after one another, with what follows each; and bytes a token."""
    end = tokenizer.token_to_id(vocabulary.END)
    ids = [token for found in tokenizer.encode_batch(list(texts)) for token in (end, *found.ids)]
    count = (len(ids) - 1) // LENGTH
    whole = torch.tensor(ids[: count * LENGTH + 1])
    size = sum(len(text.encode()) for text in texts) / (len(ids) - len(texts))
    return whole[:-1].view(count, LENGTH), whole[1:].view(count, LENGTH), size


def bits(tokenizer: Any, size: int, units: Corpus, passes: float, seed: int) -> dict[str, float]:
    """Bits a byte on the held-out texts."""
    torch.manual_seed(seed)
    x, y, _ = rows(tokenizer, [text for unit in units[0] for text in unit])
    model, steps = LanguageModel(size), max(1, round(passes * len(x) / BATCH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    pace = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        chosen = torch.randint(0, len(x), (BATCH,))
        loss = functional.cross_entropy(model(x[chosen]).mT, y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pace.step()
    x, y, each = rows(tokenizer, units[1])
    with torch.no_grad():
        losses = [
            functional.cross_entropy(model(a).mT, b, reduction="sum").item()
            for a, b in zip(x.split(64), y.split(64), strict=True)
        ]
    tokens = sum(len(found.ids) for found in tokenizer.encode_batch(list(units[1])))
    share = x.numel() / (tokens + len(units[1]))
    length = sum(len(text.encode()) for text in units[1]) * share
    return {"bytes_a_token": each, "bits_a_byte": sum(losses) / math.log(2) / length}


def tokenizers(name: str, units: list[list[str]], size: int, epsilon: float) -> dict[str, Any]:
    """One of exact counts, and a private one."""
    exact: Counter[str] = Counter()
    for unit in units:
        exact.update(vocabulary.words_of(unit))
    about = (40, 1e-4, user_unit(1000)) if name == "shakespeare" else (4, 1e-6, DOCUMENT)
    claim = VocabularyClaim.calibrated(size, about[0], epsilon, about[1], about[2])
    with tempfile.TemporaryDirectory() as folder:
        made = vocabulary.learn(Run(Path(folder) / "run"), lambda: units, claim).tokenizer
    return {"exact": vocabulary.merged({w: float(n) for w, n in exact.items()}, size)} | {
        f"epsilon {epsilon:g}": made
    }


def main() -> None:
    """Measure, one line of JSON for each tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--corpus", choices=("sst2", "shakespeare"), default="sst2")
    parser.add_argument("--passes", type=float, default=4.0)
    parser.add_argument("--size", type=int, default=4000)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    units = {"sst2": sst2, "shakespeare": shakespeare}[given.corpus](given.data_dir)
    for name, tokenizer in tokenizers(given.corpus, units[0], given.size, given.epsilon).items():
        start = time.process_time()
        found = bits(tokenizer, given.size, units, given.passes, given.seed)
        about = {"corpus": given.corpus, "passes": given.passes, "tokenizer": name}
        about |= {"tokens": tokenizer.get_vocab_size()} | found
        print(json.dumps(about | {"cpu_seconds": time.process_time() - start}), flush=True)


if __name__ == "__main__":
    main()
