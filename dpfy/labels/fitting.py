"""One call: labels noised once, a model trained on the answers, a run folder that anyone can
verify.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as load_tensors
from safetensors.torch import save
from torch import Tensor, nn

import dpfy
from dpfy.core import check, storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.labels.claim import ANSWERS, BINS, MODEL, LabelClaim
from dpfy.labels.kernel import KernelSettings, PublicMap
from dpfy.labels.learners import KernelLearner, KernelModel, Learner
from dpfy.labels.learning import LabelQuestions, LabelSetup, learn
from dpfy.labels.method import LabelMethod
from dpfy.labels.questions import SealedLabels
from dpfy.models.config import ModelConfig
from dpfy.models.features import ScatteringFeatures
from dpfy.models.features import features as feature_map
from dpfy.report import card as cards
from dpfy.runs.folder import RunFolder, complete
from dpfy.runs.released import Released
from dpfy.runs.run import Run
from dpfy.training.load import ReleasedModel

META = "dpfy"
KERNEL, NETWORK = "kernel", "network"
IMAGE = 3
"""Axes of an image: channels, height, width."""
SCATTERING = ModelConfig("scattering-linear")
Public = Callable[[nn.Module], Mapping[str, Any]]
"""What may be told about the model on public records."""


@dataclass(frozen=True, repr=False)
class LabelFit(Released):
    """What a fit leaves: a finished run with the model, and the answers that labels gave
    (`answers.0` for the records `rows.0`, and so on).
    """

    model: nn.Module = field(repr=False)
    answers: dict[str, NDArray[Any]] = field(repr=False)


def fit(
    features: Tensor | NDArray[Any],
    labels: Any,
    *,
    classes: int,
    epsilon: float,
    delta: float = 1e-5,
    method: LabelMethod | str = "projection",
    learner: Learner | None = None,
    run: Run | Path | str | None = None,
) -> LabelFit:
    """A model from public features and private labels, one a record: whole numbers from 0 to
    `classes` - 1.

    `labels` are given, or a function that opens them, called when they are paid for. `method` is
    one of `dpfy.labels.claim.METHODS` or a `LabelMethod` with its settings; `learner` what learns from
    the answers. Without `run` the folder is a new one under runs/.
    Numbers as labels: method=Method("rr-on-bins", span=(low, high)), with classes=1.

    Guarantees: the claim is reserved before a label is read; each label is read once, for one
    question, and answered with the noise that the claim states; what learns is given public
    features and answers alone. So all that is released, the model too, is (epsilon, delta)-private
    for replacing one label: pure (delta 0), but for the Gaussian noise of `projection` and
    `pate-fm`. Features are not protected.
    """
    chosen = LabelMethod.of(method)
    x = _features(features)
    check.integer("classes", classes, least=1 if chosen.name == BINS else 2)
    claim = chosen.claim(len(x), classes, epsilon, delta)
    return run_fit(Run.of(run), claim, chosen, lambda: (x, labels), learner)


def run_fit(
    place: Run,
    claim: LabelClaim,
    method: LabelMethod,
    read: Callable[[], tuple[Tensor, Any]],
    learner: Learner | None = None,
    measured: Public = lambda model: {},
    files: Mapping[str, bytes] | None = None,
) -> LabelFit:
    """A fit in its folder. `read` opens features and labels; it is called when the claim is
    reserved. `files` are public ones.
    """
    learner = learner or KernelLearner()
    if complete(place, claim):
        made = load(place.path, getattr(learner, "make", lambda: None)())
        return _left(Path(place.path), made)
    with RunFolder(place, claim) as folder:
        features, labels = read()
        if len(features) != claim.records:
            raise InvalidInput(
                "records", len(features), f"must be {claim.records}, which the claim was made for"
            )
        sealed = SealedLabels(labels, len(features), claim.outcomes, method.span)
        del labels
        ask = LabelQuestions(folder, claim, sealed)
        model = learn(LabelSetup(claim, method, features, learner), ask)
        for name, content in (files or {}).items():
            folder.write(name, content)
        folder.write(MODEL, to_bytes(model))
        folder.tell(claim.name, learner=_words(model), settings=method.told(), **measured(model))
        seed = cards.FIXED_SEED if folder.randomness.fixed else cards.SECRET_SEED
        about = {
            "dpfy": dpfy.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "seed": seed,
        }
        folder.finish(cards.Facts(about, releases=ask.asked))
    return _left(Path(place.path), model)


def load(run: Path | str, model: nn.Module | None = None) -> nn.Module:
    """The model of a finished run, its hash checked against report and ledger. A network is loaded
    into one like it, `model`.

    The model of ``dpfy train --protect labels`` reads raw records: images are scattered first.
    """
    released = ReleasedModel.read(run)
    content = storage.content(MODEL, released.file(MODEL), most=storage.MOST_DATA)
    held = load_tensors(content)
    about = _about(content)
    if about["learner"] == NETWORK:
        if model is None:
            raise InvalidInput(
                "model",
                None,
                "must be given: the run released weights of a network, to be loaded into one like "
                "it",
            )
        try:
            model.load_state_dict(held)
        except RuntimeError:
            raise InvalidInput(
                "model",
                type(model).__name__,
                "is not the network of this run: its weights have other shapes",
            ) from None
        return model.eval()
    settings = KernelSettings(**about["settings"])
    width, landmarks = len(held["public.mean"]), len(held["public.landmarks"])
    sizes = (
        held["public.landmarks"].shape[1],
        held["public.components"].shape[1],
        held["public.weights"].shape[1],
    )
    made = KernelModel(
        PublicMap(settings, width, landmarks, sizes),
        len(held["correction"]),
        held["student"].shape[1],
    )
    made.load_state_dict(held)
    if len(section(released.card).get("reads", {}).get("features", ())) == IMAGE:
        return nn.Sequential(ScatteringFeatures(SCATTERING.groups, SCATTERING.scale), made).eval()
    return made.eval()


def section(card: Mapping[str, Any]) -> dict[str, Any]:
    """What a report tells about labels; empty where it tells nothing."""
    return next((dict(part) for part in card["sections"] if part["name"] == "labels"), {})


def images(records: Tensor) -> Tensor:
    """What learns from raw records reads: images scattered, a public map of each by itself; all
    else as it is, flat.
    """
    if records.dim() != IMAGE + 1:
        return records.flatten(1).float()
    scattered = feature_map(SCATTERING)
    assert scattered is not None
    return scattered(records)


def to_bytes(model: nn.Module) -> bytes:
    """Weights as safetensors, with what is needed to make the model again."""
    about: dict[str, Any] = {"learner": NETWORK}
    if isinstance(model, KernelModel):
        about = {"learner": KERNEL, "settings": asdict(model.public.settings)}
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    return save(state, {META: json.dumps(about)})


def _about(content: bytes) -> dict[str, Any]:
    try:
        size = int.from_bytes(content[:8], "little")
        found: dict[str, Any] = json.loads(json.loads(content[8 : 8 + size])["__metadata__"][META])
        check.one_of("learner", found["learner"], (KERNEL, NETWORK))
        return found
    except (ValueError, KeyError, TypeError, InvalidInput):
        raise Corrupt(
            MODEL, "does not hold a model of labels; load it as its run was made"
        ) from None


def _words(model: nn.Module) -> str:
    if isinstance(model, KernelModel):
        return "kernel ridge regression on public features"
    return f"a network, {type(model).__name__}, trained on the answers"


def _left(path: Path, model: nn.Module) -> LabelFit:
    from safetensors.numpy import load as load_arrays

    answers = load_arrays(storage.content(ANSWERS, path / ANSWERS, most=storage.MOST_DATA))
    return LabelFit(path, model, dict(answers))


def _features(given: Tensor | NDArray[Any]) -> Tensor:
    found = given if isinstance(given, Tensor) else torch.from_numpy(np.ascontiguousarray(given))
    if not isinstance(given, Tensor | np.ndarray) or found.dim() < 2:
        raise InvalidInput(
            "features", type(given).__name__, "must be a tensor or an array, a row for each record"
        )
    if not found.dtype.is_floating_point:
        raise InvalidInput(
            "features",
            str(found.dtype),
            "must be real numbers; make floats of whole numbers, in a public scale",
        )
    return found.float()
