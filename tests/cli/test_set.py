"""`--set` reaches every field of the configuration, `--show-config` shows them, and a flag that is
gone says where it went.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from calls import told_by_line

from dpfy.cli.app import main
from dpfy.core import settings
from dpfy.core.errors import InvalidInput
from dpfy.training import config
from dpfy.training.config import SECTIONS

CSV = ["data.kind=csv", "data.path=people.csv", "data.schema=people.toml"]
IDX = ["data.kind=idx", "data.path=x", "data.labels_path=y", "data.classes=7"]
NPZ = ["data.kind=npz", "data.path=x.npz", "data.classes=3"]
IMAGES = ["data.kind=images", "data.path=x", 'data.names=["cat", "dog"]', "data.size=32"]
USER = [*CSV, "data.user=person", "data.most_records=5"]
GROUPS = [
    "training.clip=per-group",
    'training.clip_prefixes=["a.", ""]',
    "training.clip_norms=[1, 0.5]",
]
BUDGET = ["ledger.path=all.jsonl", "ledger.budget_epsilon=8", "ledger.budget_delta=1e-6"]
PHASES = ["training.noise_phases=[2, 1.5]", "training.phase_steps=[100, 20]"]
PUBLIC = [
    "public.data=CIFAR-10",
    "public.used_for=pretraining",
    "public.provenance='published 2009'",
]
EXAMPLES: dict[str, tuple[list[str], object]] = {
    "data.kind": (["data.kind=digits"], "digits"),
    "data.dir": (["data.kind=mnist", "data.dir=/some where/data"], "/some where/data"),
    "data.path": (CSV, "people.csv"),
    "data.labels_path": (IDX, "y"),
    "data.test_path": ([*CSV, "data.test_path=7"], "7"),
    "data.test_labels_path": (
        [*IDX, "data.test_path=a", "data.test_labels_path=2024-01-01"],
        "2024-01-01",
    ),
    "data.schema": (CSV, "people.toml"),
    "data.classes": (IDX, 7),
    "data.names": (IMAGES, ("cat", "dog")),
    "data.size": (IMAGES, 32),
    "data.range": ([*NPZ, "data.range=[-1, 1]"], (-1.0, 1.0)),
    "data.test_fraction": (["data.kind=digits", "data.test_fraction=0.25"], 0.25),
    "data.length": (["data.kind=text", "data.path=x.txt", "data.length=16"], 16),
    "data.test": (["data.test=withheld"], "withheld"),
    "data.user": ([*CSV, "data.user=true", "data.most_records=5"], "true"),
    "data.most_records": ([*CSV, "data.user=person", "data.most_records=5"], 5),
    "data.pick": ([*USER, "data.pick=first"], "first"),
    "data.user_loss": ([*USER, "data.user_loss=mean"], "mean"),
    "data.draw": ([*USER, "data.draw=record"], "record"),
    "data.time": ([*USER, "data.time=when", "data.window=day"], "when"),
    "data.window": ([*USER, "data.time=when", "data.window=month"], "month"),
    "model.name": (['model.name="mlp"'], "mlp"),
    "model.hidden": (["model.name=mlp", "model.hidden=[64, 32]"], (64, 32)),
    "model.activation": (["model.name=lenet5", "model.activation=relu"], "relu"),
    "model.dropout": (["model.name=mlp", "model.dropout=0.5"], 0.5),
    "model.groups": (["model.groups=9"], 9),
    "model.scale": (["model.scale=2"], 2),
    "model.seed": (["model.seed=11"], 11),
    "model.width": (["model.name=gpt-small", "model.width=64"], 64),
    "model.layers": (["model.name=gpt-small", "model.layers=2"], 2),
    "privacy.epsilon": (["privacy.epsilon=1.5"], 1.5),
    "privacy.delta": (["privacy.delta=1e-7"], 1e-7),
    "privacy.noise_multiplier": (["privacy.noise_multiplier=4"], 4),
    "privacy.records": (["privacy.records=12_000"], 12_000),
    "privacy.adjacency": (["privacy.adjacency=replace-one"], "replace-one"),
    "privacy.accountant": (["privacy.accountant=rdp"], "rdp"),
    "privacy.allow_large_delta": (["privacy.allow_large_delta=true"], True),
    "privacy.test_noise": (["data.test=billed", "privacy.test_noise=30"], 30),
    "privacy.group_size": (["privacy.group_size=4"], 4),
    "training.mechanism": (["training.mechanism=tree"], "tree"),
    "training.sampling": (["training.sampling=without-replacement"], "without-replacement"),
    "training.bands": (["training.mechanism=band-mf", "training.bands=4"], 4),
    "training.stopping": (["training.stopping=5"], 5),
    "training.patience": (["training.stopping=5", "training.patience=2"], 2),
    "training.noise": (["training.noise=exact"], "exact"),
    "training.noise_phases": (PHASES, (2.0, 1.5)),
    "training.phase_steps": (PHASES, (100, 20)),
    "training.batch_size": (["training.batch_size=256"], 256),
    "training.epochs": (["training.epochs=3"], 3),
    "training.steps": (["training.steps=7"], 7),
    "training.clip": (["training.clip=per-layer"], "per-layer"),
    "training.clip_norm": (["training.clip_norm=inf"], float("inf")),
    "training.clip_gamma": (["training.clip=automatic", "training.clip_gamma=0.1"], 0.1),
    "training.clip_quantile": (["training.clip=quantile", "training.clip_quantile=0.7"], 0.7),
    "training.clip_rate": (["training.clip=quantile", "training.clip_rate=0.1"], 0.1),
    "training.clip_count_weight": (
        ["training.clip=quantile", "training.clip_count_weight=0.3"],
        0.3,
    ),
    "training.clip_prefixes": (GROUPS, ("a.", "")),
    "training.clip_norms": (GROUPS, (1.0, 0.5)),
    "training.optimizer": (["training.optimizer=adam"], "adam"),
    "training.learning_rate": (["training.learning_rate=0.1"], 0.1),
    "training.momentum": (["training.momentum=0"], 0),
    "training.average": (["training.average=0.99"], 0.99),
    "training.loss": (["training.loss=squared_error"], "squared_error"),
    "runtime.engine": (["runtime.engine=loop"], "loop"),
    "runtime.max_physical_batch": (["runtime.max_physical_batch=auto"], "auto"),
    "runtime.pad": (["runtime.pad=true"], True),
    "runtime.graph": (["runtime.graph=true"], True),
    "runtime.device": (["runtime.device=cpu:0"], "cpu:0"),
    "runtime.checkpoint_every": (["runtime.checkpoint_every=5"], 5),
    "ledger.path": (BUDGET, "all.jsonl"),
    "ledger.budget_epsilon": (BUDGET, 8),
    "ledger.budget_delta": (BUDGET, 1e-6),
    "about.author": (["about.author='A. N. Author'"], "A. N. Author"),
    "about.data": (["about.data='visits 2024'"], "visits 2024"),
    "public.data": (PUBLIC, "CIFAR-10"),
    "public.used_for": (PUBLIC, "pretraining"),
    "public.provenance": (PUBLIC, "published 2009"),
    "ledger.budget_approximation": ([*BUDGET, "ledger.budget_approximation=1e-7"], 1e-7),
}
"""Of every field: words that set it, and the value that must arrive."""
FIELDS = [f"{name}.{field.name}" for name, section in SECTIONS.items() for field in fields(section)]
WRONG = ["[[1]]", "-7", "{a = 1}", "[true]", "nan"]


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    shown = capsys.readouterr()
    return stop.value.code, shown.out, shown.err


def given(words: list[str]) -> list[str]:
    return [part for word in words for part in ("--set", word)]


def test_there_is_an_example_of_every_field():
    assert sorted(EXAMPLES) == sorted(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_reached_and_shown(capsys, name):
    words, wanted = EXAMPLES[name]
    section, _, key = name.partition(".")
    status, out, err = call(capsys, "train", *given(words), "--show-config", "--json")
    assert status == 0, err
    found = json.loads(out)[section][key]
    assert (tuple(found) if isinstance(found, list) else found) == (
        "infinity" if wanted == float("inf") else wanted
    )
    made = config.make({}, settings.assigned(SECTIONS, words, {}))
    assert getattr(getattr(made, section), key) == wanted
    status, out, _ = call(capsys, "train", *given(words), "--show-config")
    assert status == 0
    assert config.make(tomllib.loads(out), {}) == made, (
        "what is shown is a configuration, and the same one"
    )
    assert re.search(rf"^{key} = ", out, re.MULTILINE)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_refuses_what_it_is_not(name):
    """By a message that names it; a text takes any text."""
    words, _ = EXAMPLES[name]
    others = [word for word in words if not word.startswith(f"{name}=")]
    for wrong in WRONG:
        flags = settings.assigned(SECTIONS, others, {}) | {name: tomllib.loads(f"v = {wrong}")["v"]}
        with pytest.raises(InvalidInput) as refusal:
            config.make({}, flags)
        assert refusal.value.field.startswith((name, "adjacency", "accountant")), refusal.value


def test_the_whole_default_configuration_is_shown_with_a_comment_each(capsys):
    status, out, _ = call(capsys, "train", "--show-config")
    assert status == 0
    assert config.make(tomllib.loads(out), {}) == config.JobConfig()
    comments = [line for line in out.splitlines() if line.startswith("# ") and " Default: " in line]
    assert len(comments) == len(FIELDS)
    for name in FIELDS:
        assert re.search(rf"^(# )?{name.partition('.')[2]} =", out, re.MULTILINE), name


BAD = [
    (["training.optimiser=adam"], "did you mean 'optimizer'"),
    (["trainig.optimizer=adam"], "did you mean 'training'"),
    (["epsilon=3"], "--set privacy.epsilon=..."),
    *[([text], "section.key=value") for text in ("training.optimizer", "=3", "")],
    (["training.optimizer="], "must be a value"),
    (["training.=3"], "must be one of mechanism"),
    (["privacy.epsilon=three"], "privacy.epsilon: got 'three'; must be a finite number"),
    *[
        ([text], "privacy.epsilon")
        for text in ("privacy.epsilon=[1]", "privacy.epsilon=1\nprivacy.delta=1")
    ],
    (["training.steps=1.5"], "must be a whole number"),
    (["training.steps=3", "training.steps=3"], "training.steps is given twice"),
    (["training.steps=3", "training.epochs=3"], "not both"),
    (["training.clip=microbatch"], "must be one of flat"),
    (["training.clip=flat", "training.clip_gamma=0.5"], "does not read it"),
    (["training.clip=per-group"], "training.clip_prefixes: got None; must be given"),
    (
        ["training.clip=per-group", 'training.clip_prefixes=["a"]', "training.clip_norms=[1,2]"],
        "training.clip_prefixes",
    ),
    (["training.clip=automatic", "training.clip_norm=inf"], "training.clip_norm"),
    (
        ["training.clip=quantile", "training.mechanism=tree"],
        "adaptive clipping with correlated noise is not supported",
    ),
    (["data.user=person"], "data.most_records"),
    (["data.most_records=3"], "data.user"),
    (["data.kind=digits", "data.user=p", "data.most_records=3"], "does not read it"),
    (["data.kind=mnist", "data.user=p", "data.most_records=3"], "must be writer"),
    ([*CSV, "data.draw=record"], "goes with data.user"),
    ([*USER, "data.window=day"], "data.time"),
    ([*USER, "data.time=when"], "data.window"),
    ([*USER, "data.time=when", "data.window=hour"], "data.window"),
    (["ledger.budget_approximation=1e-7"], "goes with ledger.budget_epsilon"),
    ([*BUDGET, "ledger.budget_approximation=1e-5"], "must be less than delta"),
    (["privacy.group_size=0"], "privacy.group_size"),
    (
        ["privacy.group_size=3", "training.batch_size=100", "privacy.adjacency=replace-one"],
        "is not supported; use --adjacency",
    ),
    (
        [
            "privacy.group_size=3",
            "privacy.noise_multiplier=1",
            "training.batch_size=9",
            "privacy.adjacency=replace-one",
        ],
        "is not supported",
    ),
    (["ledger.path=\udcff"], "UTF-8"),
    (["data.kind=mnist", "data.dir=\0"], "data.dir"),
]


@pytest.mark.parametrize(
    ("words", "said"),
    BAD,
    ids=[" ".join(w).encode("ascii", "backslashreplace").decode() for w, _ in BAD],
)
def test_bad_words_are_one_line(capsys, tmp_path, words, said):
    status, out, err = call(capsys, "train", *given(words), "--out", tmp_path / "run")
    assert (status, out) == (2, "")
    assert said in err
    assert told_by_line(err.splitlines())
    assert not (tmp_path / "run").exists()


def test_a_flag_and_a_word_for_one_field_are_refused(capsys):
    status, _, err = call(
        capsys, "train", "--epsilon", 3, "--set", "privacy.epsilon=2", "--show-config"
    )
    assert status == 2
    assert "privacy.epsilon is given twice" in err


def test_words_win_over_the_file_and_replace_its_alternatives(capsys, tmp_path):
    (tmp_path / "job.toml").write_text(
        "[privacy]\nepsilon = 1.0\n[training]\nepochs = 2\nlearning_rate = 0.1\n"
    )
    words = given(["training.steps=5", "privacy.noise_multiplier=2"])
    status, out, _ = call(capsys, "train", tmp_path / "job.toml", *words, "--show-config", "--json")
    shown = json.loads(out)
    assert status == 0
    assert (
        shown["training"]["steps"],
        shown["training"]["epochs"],
        shown["training"]["learning_rate"],
    ) == (5, None, 0.1)
    assert (shown["privacy"]["noise_multiplier"], shown["privacy"]["epsilon"]) == (2, None)


def test_showing_reads_no_data_and_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, _ = call(capsys, "train", *given([*CSV, *BUDGET]), "--out", "run", "--show-config")
    assert status == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("width", [80, 120])
def test_help_fits_on_one_screen(width):
    env = os.environ | {"COLUMNS": str(width), "TERMINAL_WIDTH": str(width)}
    found = subprocess.run(
        [sys.executable, "-P", "-m", "dpfy", "train", "--help"],
        capture_output=True,
        text=True,
        env=env,
    )
    assert found.returncode == 0
    assert len(found.stdout.splitlines()) <= 50
    for part in ("--set", "--show-config", "--epsilon", "--resume"):
        assert part in found.stdout


FAST = [
    "--data",
    "digits",
    "--model",
    "linear",
    "--delta",
    "1e-4",
    "--batch-size",
    "200",
    "--steps",
    "3",
]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["training.clip=per-layer"], "per-layer"),
        (["training.clip=automatic"], "automatic"),
        (["training.clip=psac", "training.clip_gamma=0.1"], "psac"),
        (["training.clip=quantile", "training.clip_quantile=0.6"], "quantile"),
        (
            ["training.clip=per-group", 'training.clip_prefixes=[""]', "training.clip_norms=[0.5]"],
            "per-group",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_clip_rules_train_and_verify(capsys, tmp_path, words, kind):
    status, _, err = call(capsys, "train", *FAST, *given(words), "--out", tmp_path / "run")
    assert status == 0, err
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["recipe"]["clip"]["kind"] == kind
    assert call(capsys, "verify", tmp_path / "run")[0] == 0


def test_phases_of_given_lengths(tmp_path, capsys):
    words = given(["training.noise_phases=[3, 1]", "training.phase_steps=[1, 2]"])
    status, _, err = call(capsys, "train", *FAST, *words, "--out", tmp_path / "run")
    assert status == 0, err
    strategy = json.loads((tmp_path / "run" / "plan.json").read_text())["recipe"]["strategy"]
    assert (strategy["lengths"], strategy["factors"]) == ([1, 2], [3.0, 1.0])


def test_the_example_of_the_repository_shows_itself(capsys):
    job = Path(__file__).parents[2] / "examples" / "job.toml"
    status, out, _ = call(capsys, "train", job, "--show-config")
    assert status == 0
    assert config.make(tomllib.loads(out), {}) == config.make(config.read_toml(job), {})


@pytest.mark.parametrize(
    "words", [[], ["data.test=billed"], ["training.mechanism=tree"]], ids=" ".join
)
def test_a_group_is_promised_what_was_asked(capsys, tmp_path, words):
    """The noise is that of the group; the card speaks of one unit, which pays less."""
    words = given(["privacy.group_size=3", *words])
    status, out, err = call(
        capsys, "train", *FAST, "--epsilon", 4, *words, "--out", tmp_path / "run", "--json"
    )
    assert status == 0, err
    found = json.loads(out)
    assert found["group"]["size"] == 3
    assert 3.9 < found["group"]["epsilon"] <= 4
    assert found["epsilon"] < 2.5
    status, again, _ = call(capsys, "train", "--resume", "--out", tmp_path / "run", "--json")
    assert json.loads(again)["group"] == found["group"]


def test_noise_that_was_fixed_is_told_for_the_group(capsys, tmp_path):
    words = given(["privacy.group_size=2", "privacy.noise_multiplier=2"])
    status, out, _ = call(capsys, "train", *FAST, *words, "--out", tmp_path / "run")
    assert status == 0
    assert "for any 2 units together: epsilon" in out
