"""What training through Trainer, Lightning and Accelerate costs over the same run of level 2:
ratios of CPU seconds, in one process.

    python benchmarks/integrations.py [--steps 12] [--rounds 5] [--model gpt2]

Each round trains the same model by the same plan through level 2 and through each tool, each time
beginning with another. A run is timed between its third step and its last, so that what is paid
once (imports, opening of the run, first checks, writing of the card) is left out. The watch over
mixing checks the same steps in all of them. Evaluation and saving are off, logging is on.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dpfy
from dpfy.integrations import trainer
from dpfy.integrations.accelerate import PrivateAccelerator
from dpfy.integrations.hugging_face import PrivateTrainer
from dpfy.integrations.lightning import PrivateStrategy

RECORDS, LENGTH, WORDS = 640, 64, 1000
FIRST = 2
"""Steps before the clock starts."""


def gpt2(wide: int = 128) -> nn.Module:
    """Two layers: a step of about a second on one core."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=wide, n_layer=2, n_head=4
    )
    return transformers.GPT2LMHeadModel(config)


def bert(wide: int = 128) -> nn.Module:
    """Two layers and a classifier."""
    shape = {
        "hidden_size": wide,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 4 * wide,
    }
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=WORDS, num_labels=3, **shape)
    )


MODELS: dict[str, Callable[..., nn.Module]] = {"gpt2": gpt2, "bert": bert}


class Texts(Dataset):
    """Random words; their labels are the words themselves, or a class."""

    def __init__(self, name: str, records: int = RECORDS) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(1, WORDS, (records, LENGTH), generator=generator)
        self.labels = self.ids if name == "gpt2" else self.ids[:, 0] % 3

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Clock:
    """CPU seconds between the end of step FIRST and the end of the last step."""

    def __init__(self, steps: int) -> None:
        self.steps, self.began, self.seconds = steps, 0.0, 0.0

    def tick(self, done: int) -> None:
        """A step was made."""
        if done == FIRST:
            self.began = time.process_time()
        if done == self.steps:
            self.seconds = time.process_time() - self.began


class Case:
    """A model, its data and its plan; each method trains it in one way and returns the CPU
    seconds.
    """

    def __init__(self, name: str, steps: int, batch: int, physical: int, **shape: Any) -> None:
        self.name, self.shape = name, shape
        self.plan = dpfy.dpsgd(RECORDS, batch, steps=steps, clip_norm=0.5).with_noise(
            1.0, delta=1e-4
        )
        self.runtime = dpfy.Runtime(max_physical_batch=physical, device="cpu")
        self.steps = steps

    def fresh(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model and its optimizer, as every run begins."""
        torch.manual_seed(0)
        net = MODELS[self.name](**self.shape)
        net.train()
        return net, torch.optim.AdamW(net.parameters(), lr=1e-3)

    def loader(self) -> DataLoader:
        """The data, as torch users hold it."""
        return DataLoader(Texts(self.name), batch_size=8, shuffle=True)

    def run(self, place: Path) -> dpfy.Run:
        """The same secret for all, so that they do the same work."""
        return dpfy.Run(place / "run", seed=1, checkpoint_every=1e6)

    def level_two(self, place: Path) -> float:
        """The loop by hand."""
        (net, optimizer), clock = self.fresh(), Clock(self.steps)
        loss = trainer.of_model(net)
        with dpfy.PrivateTraining(
            net, optimizer, self.loader(), self.plan, self.run(place), runtime=self.runtime
        ) as training:
            for batch in training.batches():
                training.step(loss(net(input_ids=batch["input_ids"]), {"labels": batch["labels"]}))
                if training.boundary:
                    clock.tick(training.steps_done)
        return clock.seconds

    def trainer(self, place: Path) -> float:
        """Hugging Face's Trainer."""
        (net, optimizer), clock = self.fresh(), Clock(self.steps)

        class Tick(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                clock.tick(state.global_step)

        quiet = {
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            "logging_steps": 1,
            "log_level": "error",
        }
        made = PrivateTrainer(
            model=net, args=transformers.TrainingArguments(str(place / "out"), **quiet), train_dataset=Texts(self.name), plan=self.plan,  # noqa: E501
            run=self.run(place), runtime=self.runtime, callbacks=[Tick()], optimizers=(optimizer, None),
        )  # fmt: skip
        made.train()
        return clock.seconds

    def lightning(self, place: Path) -> float:
        """Lightning."""
        (net, optimizer), clock = self.fresh(), Clock(self.steps)
        loss = trainer.of_model(net)

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                return loss(self.net(input_ids=batch["input_ids"]), {"labels": batch["labels"]})

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return optimizer

            def on_train_batch_end(self, *given: Any) -> None:
                clock.tick(self.trainer.global_step)

        strategy = PrivateStrategy(self.plan, self.run(place), runtime=self.runtime, device="cpu")
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        made = lightning.Trainer(
            strategy=strategy, max_steps=self.steps, accelerator="cpu", devices=1, **quiet
        )
        made.fit(Module(), self.loader())
        return clock.seconds

    def accelerate(self, place: Path) -> float:
        """Accelerate."""
        (net, optimizer), clock = self.fresh(), Clock(self.steps)
        loss, mine = (
            trainer.of_model(net),
            PrivateAccelerator(plan=self.plan, run=self.run(place), runtime=self.runtime, cpu=True),
        )
        model, moved, loader = mine.prepare(net, optimizer, self.loader())
        while mine.training is None or not mine.training.folder.finished:
            for batch in loader:
                mine.backward(
                    loss(model(input_ids=batch["input_ids"]), {"labels": batch["labels"]})
                )
                moved.step()
                moved.zero_grad()
                if mine.sync_gradients and mine.training is not None:
                    clock.tick(mine.training.steps_done)
        return clock.seconds


def measured(case: Case, rounds: int) -> dict[str, dict[str, float]]:
    """For each tool the median over the rounds of its CPU seconds over those of level 2 in the same
    round.
    """
    tools = {
        "level 2": case.level_two,
        "Trainer": case.trainer,
        "Lightning": case.lightning,
        "Accelerate": case.accelerate,
    }
    seen: dict[str, list[float]] = {name: [] for name in tools}
    for turn in range(rounds):
        order = list(tools)[turn % len(tools) :] + list(tools)[: turn % len(tools)]
        for name in order:
            with tempfile.TemporaryDirectory() as place:
                seen[name].append(tools[name](Path(place)))
            gc.collect()
    base = seen["level 2"]
    return {
        name: {
            "seconds": statistics.median(found),
            "ratio": statistics.median(a / b for a, b in zip(found, base, strict=True)),
        }
        for name, found in seen.items()
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--physical", type=int, default=16)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    case = Case(given.model, given.steps, given.batch, given.physical)
    print(
        json.dumps(
            {
                "model": given.model,
                "steps": given.steps,
                "rounds": given.rounds,
                "tools": measured(case, given.rounds),
            }
        )
    )


if __name__ == "__main__":
    main()
