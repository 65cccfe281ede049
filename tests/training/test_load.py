"""Life after training: the released model back from its folder, plain names for compiled models,
adapters alone, and what is refused.
"""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dpfy
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput, Unsupported
from dpfy.core.storage import sha256_of
from dpfy.queries.plan import QueryTerms
from dpfy.queries.run import answered
from dpfy.report import card as cards
from dpfy.training import Update, config, job, save_pretrained, weights

sys.path.insert(0, str(Path(__file__).parent))
import small

MODEL = "model.safetensors"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run of averaged weights, and the model that it left in memory."""
    path = tmp_path_factory.mktemp("runs") / "run"
    net = small.model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    run = dpfy.Run(path, seed=5)
    dpfy.fit(
        net,
        small.data(),
        plan=small.plan(4),
        optimizer=optimizer,
        run=run,
        update=Update(average=0.9),
    )
    return path, net


def same(a: nn.Module, b: nn.Module) -> bool:
    mine, theirs = weights.plain(a), weights.plain(b)
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name]) for name in mine
    )


def test_weights_go_into_the_users_model_as_they_were_released(done):
    path, trained = done
    net = dpfy.load(path, small.model(seed=1))
    assert same(net, trained)
    assert same(dpfy.load(str(path), nn.DataParallel(small.model(seed=1))), trained)
    assert same(dpfy.load(path, torch.compile(small.model(seed=1))), trained)
    assert dpfy.load(path, small.model(seed=1).double())[0].weight.dtype is torch.float64


def other(change):
    net = small.model(seed=1)
    change(net)
    return net


REFUSED = [
    (lambda: nn.Linear(3, 3), "is not the model of this run: it lacks 0.bias"),
    (
        lambda: other(lambda net: net.append(nn.Linear(3, 3))),
        "has, beside the released weights, 4.bias",
    ),
    (
        lambda: other(lambda net: net.__setitem__(0, nn.Linear(13, 16))),
        r"0.weight has shape \[16, 13\] and not \[16, 12\]",
    ),
    (
        lambda: small.model(seed=1).bfloat16(),
        "was released as torch.float32: load into that type, then convert",
    ),
    (lambda: "mlp", "model: got 'str'; must be a torch.nn.Module"),
    (lambda: None, "was made by a program, which knows the model"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_another_model_is_refused_in_one_line_and_left_as_it_is(done, make, words):
    net = make()
    before = (
        {k: v.clone() for k, v in net.state_dict().items()} if isinstance(net, nn.Module) else {}
    )
    with pytest.raises(InvalidInput, match=words) as problem:
        dpfy.load(done[0], net)
    assert "\n" not in str(problem.value)
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())


def changed_weights(folder):
    held = load_file(folder / MODEL)
    held["0.bias"] += 1
    save_file(held, folder / MODEL)


def pickled(folder):
    (folder / MODEL).write_bytes(pickle.dumps({"0.weight": 1}))


def new_hash(folder):
    """A careful forger: exchanges the model and its hash on the card."""
    changed_weights(folder)
    card = json.loads((folder / "privacy.json").read_text())
    card["files"][MODEL] = "0" * 64
    (folder / "privacy.json").write_text(json.dumps(card))


def forged(folder):
    """A better one: the card fits the exchanged model and its own digest; the ledger does not know
    it.
    """
    changed_weights(folder)
    card = json.loads((folder / "privacy.json").read_text())
    card["files"][MODEL] = sha256_of(folder / MODEL)
    card.pop("digest")
    (folder / "privacy.json").write_bytes(cards.render(cards.sealed(card)))


DAMAGED = [
    (lambda folder: shutil.rmtree(folder), InvalidInput, "is not a folder"),
    (lambda folder: [p.unlink() for p in folder.iterdir()], InvalidInput, "holds no dpfy run"),
    (lambda folder: (folder / "privacy.json").unlink(), InvalidInput, "is unfinished"),
    (lambda folder: (folder / MODEL).unlink(), Corrupt, "does not have the hash"),
    (lambda folder: (folder / "ledger.jsonl").write_text(""), DpfyError, "ledger"),
    (changed_weights, Corrupt, "model.safetensors: does not have the hash"),
    (pickled, Corrupt, "does not have the hash"),
    (new_hash, Corrupt, "privacy.json"),
    (
        forged,
        Corrupt,
        r"privacy.json: is not the report with which ledger.jsonl says that the run ended",
    ),
]


@pytest.mark.parametrize(
    ("damage", "kind", "words"), DAMAGED, ids=[str(n) for n in range(len(DAMAGED))]
)
def test_a_folder_that_is_no_whole_run_is_refused(done, tmp_path, damage, kind, words):
    shutil.copytree(done[0], tmp_path / "run")
    damage(tmp_path / "run")
    with pytest.raises(kind, match=words) as problem:
        dpfy.load(tmp_path / "run", small.model())
    assert "\n" not in str(problem.value)


def test_a_run_is_given_by_its_path():
    for given in (3, None, b"runs/x", small):
        with pytest.raises(InvalidInput, match="must be the folder of a finished run, as a path"):
            dpfy.load(given, small.model())


def test_a_run_that_released_no_model_says_so(tmp_path):
    (tmp_path / "people.csv").write_text("age\n30\n40\n")
    (tmp_path / "schema.toml").write_text('[columns.age]\nkind = "number"\nrange = [0, 100]\n')
    terms = QueryTerms(epsilon=1.0)
    answered(
        tmp_path / "people.csv",
        "count()",
        schema=tmp_path / "schema.toml",
        terms=terms,
        run=tmp_path / "run",
    )
    with pytest.raises(InvalidInput, match="released no model"):
        dpfy.load(tmp_path / "run", small.model())


@pytest.mark.parametrize("name", ["mlp", "scattering-linear", "tanh-cnn"])
def test_a_model_of_the_command_line_comes_back_from_its_folder_alone(tmp_path, name):
    """It gives the answers on raw records that the evaluation of the run counted."""
    rng = np.random.default_rng(1)
    images, classes = rng.integers(0, 256, (60, 1, 28, 28), dtype=np.uint8), rng.integers(0, 3, 60)
    np.savez(tmp_path / "images.npz", x=images, y=classes)
    flags = {
        "data.kind": "npz", "data.path": str(tmp_path / "images.npz"), "data.classes": 3, "data.test": "public", "model.name": name,  # noqa: E501
        "privacy.records": 48, "privacy.delta": 1e-3, "training.steps": 2, "training.batch_size": 10.0,
    }  # fmt: skip
    whole = config.make({}, flags)
    made = job.run(whole, tmp_path / "run", seed=3)
    net = dpfy.load(tmp_path / "run")
    assert not net.training
    held = job.source.load(whole.data).test
    with torch.no_grad():
        right = (net(held.tensors[0]).argmax(1) == held.tensors[1]).double().mean()
    assert float(right) == pytest.approx(
        small.card_of(made.run)["utility"]["test_accuracy"], abs=1e-12
    )


def train(net, path, data=None):
    """Train `net` for four steps, or resume."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    run = dpfy.Run(path, resume=True, seed=5)
    return dpfy.fit(
        net,
        small.data() if data is None else data,
        plan=small.plan(4),
        optimizer=optimizer,
        run=run,
    )


@pytest.mark.parametrize(
    "wrap",
    [torch.compile, lambda net: net.compile() or net, nn.DataParallel],
    ids=["function", "method", "parallel"],
)
def test_wrapped_models_release_plain_names(tmp_path, wrap):
    plain = small.model()
    train(plain, tmp_path / "plain")
    net = wrap(small.model())
    train(net, tmp_path / "run")
    held = load_file(tmp_path / "run" / MODEL)
    assert held.keys() == small.model().state_dict().keys()
    assert small.card_of(tmp_path / "run")["model"]["class"] == "Sequential"
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))
    assert same(dpfy.load(tmp_path / "run", small.model(seed=1)), net)
    again = train(
        wrap(small.model(seed=1)), tmp_path / "run"
    )  # resumed though finished: the released weights
    assert again.steps == 4
    part = nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert set(weights.plain(part)) == {"0.weight", "0.bias", "1.weight", "1.bias"}


IDS = torch.randint(0, 30, (small.RECORDS, 6), generator=torch.Generator().manual_seed(1))
WORDS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS[:, 0] % 2}


def bert(seed=0):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=30, max_position_embeddings=8, **sizes)
    )


def lora(net, seed=7, freeze_a=False):
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    made = peft.get_peft_model(
        net, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    )
    if freeze_a:
        for name, p in made.named_parameters():
            if "lora_A" in name:
                p.requires_grad_(False)
    return made


@pytest.mark.parametrize("freeze_a", [False, True])
def test_an_adapter_is_released_alone_with_its_base_on_the_card(tmp_path, freeze_a):
    net = lora(bert(), freeze_a=freeze_a)
    train(net, tmp_path / "run", data=WORDS)
    held = load_file(tmp_path / "run" / MODEL)
    assert len(held) == 6
    assert all("lora_" in name or "modules_to_save" in name for name in held)
    told = small.card_of(tmp_path / "run")["model"]
    assert told["holds"] == "the adapter alone"
    assert told["base"]["name"] == "BertForSequenceClassification"
    assert len(told["base"]["sha256"]) == 64
    assert told["base"]["sha256"][:16] in (tmp_path / "run" / "report.html").read_text()
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))
    # Another head and other first matrices of the adapter: both are released, and neither is the
    # base.
    fresh = lora(bert(), seed=8, freeze_a=freeze_a)
    with torch.no_grad():
        fresh.get_parameter("base_model.model.classifier.original_module.weight").add_(1)
    ours, theirs = (weights.released(m) for m in (net, dpfy.load(tmp_path / "run", fresh)))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    train(lora(bert(), seed=8, freeze_a=freeze_a), tmp_path / "run", data=WORDS)  # finished before


def test_an_adapter_goes_onto_its_own_base_alone(tmp_path):
    train(lora(bert()), tmp_path / "run", data=WORDS)
    with pytest.raises(
        InvalidInput,
        match=r"model base: got 'sha256 .*must be BertForSequenceClassification with the weights",
    ):
        dpfy.load(tmp_path / "run", lora(bert(seed=1)))
    with pytest.raises(InvalidInput, match="model base"):
        dpfy.load(tmp_path / "run", lora(bert().bfloat16()))
    with pytest.raises(InvalidInput, match="has no adapter, and the run released one alone"):
        dpfy.load(tmp_path / "run", bert())
    train(bert(), tmp_path / "whole", data=WORDS)
    with pytest.raises(InvalidInput, match="has an adapter, and the run released a whole model"):
        dpfy.load(tmp_path / "whole", lora(bert()))


@pytest.mark.parametrize("kind", ["adapter", "compiled"])
def test_what_was_wrapped_is_resumed_as_if_uninterrupted(tmp_path, kind):
    class Stop(Exception):
        pass

    def run(path, stop):
        net = lora(bert()) if kind == "adapter" else torch.compile(small.model())
        calls = []

        def enter(module, args):
            calls.append(1)
            if stop and len(calls) > 2:
                raise Stop

        net.register_forward_pre_hook(enter)
        train(net, path, data=WORDS if kind == "adapter" else None)

    run(tmp_path / "whole", False)
    with pytest.raises(Stop):
        run(tmp_path / "cut", True)
    run(tmp_path / "cut", False)
    assert (tmp_path / "cut" / MODEL).read_bytes() == (tmp_path / "whole" / MODEL).read_bytes()


def test_an_adapter_of_prompts_is_released_alone(tmp_path):
    """It has no layer of its own inside of the base."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    sizes = {
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 16,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=30, **sizes))
    net = peft.get_peft_model(
        net, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    assert set(weights.released(net)) == {"prompt_encoder.default.embedding.weight"}


@pytest.mark.parametrize("adapted", [False, True])
def test_a_hugging_face_model_is_saved_as_it_saves_itself_with_the_card_beside_it(
    tmp_path, adapted
):
    transformers = pytest.importorskip("transformers")
    make = (lambda seed=0: lora(bert(), seed=seed)) if adapted else bert
    net = make()
    train(net, tmp_path / "run", data=WORDS)
    place = save_pretrained(tmp_path / "run", make(seed=0 if adapted else 3), tmp_path / "model")
    assert (place / "privacy.json").read_bytes() == (tmp_path / "run" / "privacy.json").read_bytes()
    assert all(f.holds for f in dpfy.verify(place / "privacy.json"))
    if adapted:
        peft = pytest.importorskip("peft")
        back = peft.PeftModel.from_pretrained(bert(), str(place))
    else:
        back = transformers.BertForSequenceClassification.from_pretrained(str(place))
    net.eval(), back.eval()
    with torch.no_grad():
        assert torch.equal(net(IDS).logits, back(IDS).logits)
    with pytest.raises(InvalidInput, match="must be new or empty"):
        save_pretrained(tmp_path / "run", make(), place)
    with pytest.raises(InvalidInput, match="outside of the run folder"):
        save_pretrained(tmp_path / "run", make(), tmp_path / "run" / "model")
    with pytest.raises(Unsupported, match="save_pretrained for Sequential"):
        save_pretrained(tmp_path / "run", small.model(), tmp_path / "other")


def test_the_card_names_no_folder_of_the_machine():
    net = lora(bert())
    for said, shown in (
        ("/home/me/models/bert", "bert"),
        ("google/bert", "google/bert"),
        ("../private/bert", "bert"),
        ("", None),
    ):
        net.peft_config["default"].base_model_name_or_path = said
        assert weights.base_of(net)["name"] == (shown or "BertForSequenceClassification")
