"""After training: the released model back from its run folder, its hash checked against report and
ledger. Nothing pickled is ever read.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dpfy.core import storage
from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.core.storage import sha256_of
from dpfy.models import build, features
from dpfy.report import card as cards
from dpfy.report import verify, words
from dpfy.report.words import is_absent
from dpfy.runs.mark import CANARIES
from dpfy.training import weights
from dpfy.training.config import SECTIONS, JobConfig, make

MODEL, CONFIG, LEDGER, ANSWERS = (
    "model.safetensors",
    "config.toml",
    "ledger.jsonl",
    "answers.safetensors",
)
READS = dict.fromkeys(("embedded", "mnist", "fashion-mnist"), ((1, 28, 28), 10)) | {
    "digits": ((1, 8, 8), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
}
"""The shape of a record and the number of classes of data sets that everybody knows."""
BESIDE = (cards.NAME, "report.md")
"""What goes beside a model that leaves its run folder."""


@dataclass(frozen=True)
class ReleasedModel:
    """A finished run that released a model: its folder, and its report in the layout of the present
    format.

    Guarantees: the report is the one with which the ledger says that the run ended.
    """

    folder: Path
    card: dict[str, Any]

    @classmethod
    def read(cls, run: Path | str) -> ReleasedModel:
        """The finished run in the folder `run`; anything else is one line."""
        if not isinstance(run, str | Path):
            raise InvalidInput(
                "run", type(run).__name__, "must be the folder of a finished run, as a path"
            )
        folder = Path(run)
        if not folder.is_dir():
            raise InvalidInput("run", str(run), "is not a folder: give that of a finished run")
        if not (folder / cards.NAME).is_file():
            begun = (folder / LEDGER).is_file() or (folder / "plan.json").is_file()
            rule = (
                "is unfinished: nothing was released yet; resume it first"
                if begun
                else "holds no dpfy run"
            )
            raise InvalidInput("run", str(run), rule)
        card, ended = (
            verify.load_card(folder / cards.NAME),
            Ledger.read(folder / LEDGER).book.finish,
        )
        if ended is None or hashlib.sha256(cards.render(card)).hexdigest() != ended["card"]:
            raise Corrupt(
                cards.NAME, f"is not the report with which {LEDGER} says that the run ended"
            )
        cards.require_a_trial(card, folder)
        if MODEL not in card["files"]:
            raise InvalidInput("run", str(run), "released no model")
        return cls(folder, words.raised(card))

    @property
    def told(self) -> dict[str, Any]:
        """What the report tells about training."""
        return cards.trained_section(self.card)

    def file(self, name: str) -> Path:
        """A file of the run, once its content is seen to be what the report states."""
        stated = self.card["files"].get(name)
        if stated is None:
            raise InvalidInput("run", str(self.folder), f"keeps no {name}")
        if not (self.folder / name).is_file() or sha256_of(self.folder / name) != stated:
            raise Corrupt(
                name,
                "does not have the hash that the report states: it was changed, exchanged or removed",
            )
        return self.folder / name

    def weights(self) -> dict[str, Tensor]:
        """The released weights, by plain names; of a run that was audited by canaries beside the
        model, those of the model.
        """
        try:
            held = load_file(self.file(MODEL))
        except (SafetensorError, ValueError, OSError):
            raise Corrupt(MODEL, "is no file of weights in the safetensors format") from None
        if (self.folder / CANARIES).is_file() and "table.weight" in held:
            inner = {k.removeprefix("model."): v for k, v in held.items() if k != "table.weight"}
            return inner if len(inner) == len(held) - 1 else held
        return held

    def into(self, model: nn.Module) -> nn.Module:
        """`model` with the released weights."""
        if not isinstance(model, nn.Module):
            raise InvalidInput("model", type(model).__name__, "must be a torch.nn.Module")
        self._require_base(model)
        weights.restore(model, self.weights(), "is not the model of this run")
        return model

    def _require_base(self, model: nn.Module) -> None:
        """Refuse to put an adapter on another base than that of the report, or on none."""
        due, mine = self.told.get("model", {}).get("base"), weights.base_of(model)
        if due is None or is_absent(due):
            if mine is not None:
                raise InvalidInput(
                    "model",
                    type(model).__name__,
                    "has an adapter, and the run released a whole model: load it into that",
                )
            return
        if mine is None:
            rule = (
                f"has no adapter, and the run released one alone: make it with peft as for "
                f"training, on {due['name']}"
            )
            raise InvalidInput("model", type(model).__name__, rule)
        if mine["sha256"] != due["sha256"]:
            rule = (
                f"must be {due['name']} with the weights that the adapter was trained on (sha256 "
                f"{due['sha256'][:12]}..., in the report)"
            )
            raise InvalidInput("model base", f"sha256 {mine['sha256'][:12]}...", rule)

    def config(self) -> JobConfig:
        """The configuration of a run of `dpfy train`, as it was published."""
        if ANSWERS in self.card["files"]:
            raise InvalidInput(
                "run",
                str(self.folder),
                "released a model of private labels: load it with dpfy.labels.load(run)",
            )
        if CONFIG not in self.card["files"]:
            rule = (
                "was made by a program, which knows the model: load the weights into one with "
                "dpfy.load(run, model)"
            )
            raise InvalidInput("run", str(self.folder), rule)
        return make(
            {k: v for k, v in storage.toml("config", self.file(CONFIG)).items() if k in SECTIONS},
            {},
        )

    def reads(self) -> tuple[tuple[int, ...], int]:
        """The shape of a record that the model reads, and the number of classes."""
        kind, said = self.config().data.kind, self.told.get("model", {}).get("reads")
        if said is not None:
            return tuple(said["features"]), said["classes"]
        if kind not in READS:
            rule = (
                "does not say what its records look like: it was made by an earlier version; use "
                "dpfy.load(run, model)"
            )
            raise InvalidInput("run", str(self.folder), rule)
        return READS[kind]

    def built(self) -> nn.Module:
        """The model of a run of `dpfy train`, from raw records to one score for each class, in
        evaluation mode.
        """
        config = self.config().model
        head = self.into(build.build(config, *self.reads()))
        return features.full_model(config, head).eval()


def load(run: Path | str, model: nn.Module | None = None) -> nn.Module:
    """The released model of a finished run.

    With `model` the weights go into it, and it is returned: a compiled or parallel one is filled
    inside, an adapter (peft) goes onto the base that it was trained on. Without it the model is
    made from the configuration of a run of ``dpfy train``, in evaluation mode.

    Guarantees: the weights are those whose hash report and ledger state (averaged, where the run
    averaged); a refused model is left as it was. Whatever is done with them, without the data,
    costs nothing.
    """
    released = ReleasedModel.read(run)
    return released.built() if model is None else released.into(model)


def save_pretrained(run: Path | str, model: nn.Module, folder: Path | str) -> Path:
    """Write the released model as Hugging Face does (``model.save_pretrained``), with the run's
    report beside it. Returns the folder.

    Of an adapter (peft) the adapter is written, with its configuration.

    Guarantees: `model` holds the released weights when it is written; an existing folder with files
    in it is refused.
    """
    place = Path(folder)
    bare: Any = weights.inside(model) if isinstance(model, nn.Module) else model
    if not hasattr(bare, "save_pretrained"):
        raise Unsupported(
            f"save_pretrained for {type(bare).__name__}",
            "publish the run folder: model.safetensors holds the weights",
        )
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InvalidInput("folder", str(folder), "must be new or empty")
    released = ReleasedModel.read(run)
    if os.path.realpath(place).startswith(os.path.realpath(released.folder) + os.sep):
        raise InvalidInput(
            "folder", str(folder), "must lie outside of the run folder, which stays as it is"
        )
    released.into(model)
    bare.save_pretrained(str(place))
    for name in BESIDE:
        if (released.folder / name).is_file():
            shutil.copyfile(released.folder / name, place / name)
    return place
