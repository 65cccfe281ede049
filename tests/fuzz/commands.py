"""Hostile command lines: a sensible one for a verb, read off the verb's own parameters, with a few
of its values replaced.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Case

FOLDER = "work"

WHOLE = ["-1", "0", "1", "2", "7", "100", "2147483647", "2147483648", "4294967296", "9007199254740993", "9223372036854775807",  # noqa: E501
         "9223372036854775808", "18446744073709551616", "9" * 100, "9" * 5000, "1e5", "1.5", "0x10", "١٢", "", "-0", "+3",  # noqa: E501
         " 3 ", "1_000", "nan", "inf", "--5", "three", "1" + "0" * 30]  # fmt: skip
REAL = ["0", "-0.0", "1e-320", "5e-324", "2.3e-308", "1e-300", "1e-100", "1e-16", "1e-15", "1e-9", "1e-6", "1e-3", "0.5", "1", "1.0000001",  # noqa: E501
        "0.9999999999999999", "3", "64", "1e5", "1e9", "1e12", "1e18", "1e300", "1.7976931348623157e308", "1e309", "inf", "-inf",  # noqa: E501
        "nan", "-1", "-1e-320", "1,5", "", "0x1p3", "1e", "٣", "one", "1_0", "1e-1000"]  # fmt: skip
WORDS = ["", " ", "a" * 10_000, "\x1b[2J\x1b[31mverified", "a\nb", "\udcff", "../..", "%s%n%x", "{0}", "$(true)", "😀", "-", "--", "None",  # noqa: E501
         "tight", "poisson", "cpu", "cuda:99", "meta", "auto", "2,1.5,1", "nan,inf", "1," * 5000, "1e-320,1e308", "0", "linear", "mlp",  # noqa: E501
         "dense", "band-mf", "1x28x28", "1x-1", "x", "0x0", "1x99999999x99999999", "28", "1x8x8", "9" * 30 + "x1"]  # fmt: skip  # noqa: E501
TOML = ["[]", "[[]]", "[1, 2]", "[2.0, 1.5]", "[0.5, "
                                              "-1]", "{}", "{a = 1}", "true", "false", "1979-05-27", "07:32:00", '"linear"',  # noqa: E501
        "'x", '"""', "[1\n]", "1\n[privacy]\ndelta = "
                              "0.5", "1 # x", "[" * 3000, '["", '
                                                          '"a."]', "quantile", "per-layer", "per-group",
        "automatic", "psac", "digits", "csv", "billed", "replace-one", "rdp", "ftrl", "tree", "loop", "batched"]  # fmt: skip  # noqa: E501
PATHS = ["run", "other", "audited", "unfinished", "people.jsonl", "job.toml", "phases.toml", "schema.toml", "data.csv", "data.csv.gz",  # noqa: E501
         "images.idx", "arrays.npz", "text.txt", "card.json", "run/privacy.json", "run/ledger.jsonl", "run/model.safetensors",  # noqa: E501
         "run/plan.json", "run/report.html", "key.pem", "key.pem.pub",
         "dangling", "loop", "linked", "pipe", "pipe.svg", "folder", "empty", "mine", "mine.svg",
         "mine/checkpoint", "other-config", "dotted", "closed", "shut", "shut/x", "\udcff\udcfe.toml", "a b\nc", "\x1b[2Jred.toml",  # noqa: E501
         "nowhere", "no/such/folder", "data.csv/x", "a" * 300, "b" * 250 + ".svg",
         "deep/" * 900 + "x", "", ".", "..", "/dev/full", "/dev/null",
         "/dev/zero", "/dev/stdin", "/proc/self/mem", "/proc/self/environ", "~", "~nobody/x",
         "outside.svg", "new.svg", "new.html", "new.jsonl",
         "new", "./run/../run", "run/", "unfinished/checkpoint"]  # fmt: skip

BASE: dict[tuple[str, ...], dict[str, str]] = {
    ("plan", "account"): {"--noise-multiplier": "1.2", "--delta": "1e-5", "--sampling-rate": "0.02", "--steps": "50"},
    ("plan", "calibrate"): {"--epsilon": "2", "--delta": "1e-5", "--sampling-rate": "0.02", "--steps": "50", "--accountant": "rdp"},  # noqa: E501
    ("plan", "compare", "bounds"): {"--noise-multiplier": "1.2", "--delta": "1e-5", "--sampling-rate": "0.02", "--steps": "20"},  # noqa: E501
    ("plan", "compare", "tuning"): {"--noise-multiplier": "2", "--delta": "1e-5", "--sampling-rate": "0.02", "--steps": "20"},  # noqa: E501
    ("plan", "compare", "mechanisms"): {"--records": "500", "--batch-size": "50", "--steps": "6", "--epsilon": "2", "--delta": "1e-4"},  # noqa: E501
    ("report", "compare"): {},
    ("init",): {},
    ("inspect",): {"--model": "linear", "--shape": "1x8x8", "--batch-size": "8"},
    ("verify",): {},
    ("report",): {},
    ("plan", "explore"): {"--port": "0"},
    ("reproduce",): {"--stored": ""},
    ("audit", "mechanism"): {"--canaries": "60", "--steps": "4"},
    ("audit", "users"): {"--users": "20", "--canaries": "12", "--steps": "3"},
    ("audit", "run"): {},
    ("audit", "selftest"): {},
    ("fit",): {"--schema": "schema.toml", "--estimator": "naive-bayes", "--epsilon": "1", "--out": "new"},
    ("sign",): {"--key": "key.pem"},
    ("serve", "teach"): {"--voters": "5", "--out": "new"},
    ("serve", "start"): {"--out": "new", "--answers": "5", "--epsilon": "3", "--port": "0"},
    ("ledger", "show"): {"--delta": "1e-6"},
    ("ledger", "create"): {"--epsilon": "8", "--delta": "1e-5"},
    ("audit", "train"): {"--model": "linear", "--steps": "2", "--canaries": "12", "--out": "new"},
    ("train",): {"--records": "1438", "--model": "linear", "--delta": "1e-4", "--batch-size": "30", "--steps": "2",
                 "--out": "new"},
}  # fmt: skip
"""A cheap setting of each verb that has one; a verb that is not here is called with hostile values
alone.
"""
GIVEN = {
    ("init",): ["data.csv"],
    ("train",): ["digits"],
    ("audit", "train"): ["digits"],
    ("fit",): ["data.csv"],
    ("report", "compare"): ["run", "other"],
    ("verify",): ["run"],
    ("report",): ["run"],
    ("sign",): ["run"],
    ("predict",): ["run", "arrays.npz"],
    ("serve", "teach"): ["digits"],
    ("serve", "start"): ["nowhere"],
    ("audit", "run"): ["audited"],
    ("ledger", "show"): ["people.jsonl"],
    ("ledger", "create"): ["people.jsonl"],
}
WEIGHT = {
    ("plan", "account"): 5,
    ("plan", "calibrate"): 3,
    ("train",): 6,
    ("audit", "mechanism"): 2,
    ("plan", "compare", "mechanisms"): 1,
    ("verify",): 2,
}
OUTPUTS = ("--out", "--plot", "--new-key")
AUDITED = (
    "audit.json",
    "audit.svg",
    "report.html",
    "report.md",
    "ledger.jsonl",
    "ledger.jsonl.head",
)
WRITTEN = {
    ("report",): ("report.html", "report.md"),
    ("audit", "run"): AUDITED,
    ("sign",): ("signature.json",),
}
"""What a verb may write in the run folder that it is given."""


def verbs() -> dict[tuple[str, ...], list[Any]]:
    """Every verb of the command line with its parameters, as the parser knows them."""
    import typer

    from dpfy.cli.app import app
    from dpfy.cli.plugins import PluginCommand

    found: dict[tuple[str, ...], list[Any]] = {}

    def walk(command: Any, path: tuple[str, ...]) -> None:
        if hasattr(command, "commands"):
            for name in command.list_commands(None):
                walk(command.get_command(None, name), (*path, name))
        elif isinstance(command, PluginCommand):
            walk(command.command(), path)
        else:
            found[path] = list(command.params)

    walk(typer.main.get_command(app), ())
    return found


def kind_of(parameter: Any) -> str:
    """integer, float, path or text; typer has kept this in two places."""
    if hasattr(parameter, "type_descriptor"):
        return {int: "integer", float: "float", Path: "path"}.get(
            parameter.type_descriptor.annotation, "text"
        )
    return str(getattr(parameter.type, "name", "text"))


def value(rng: random.Random, parameter: Any) -> str:
    """A value for a parameter, more often of its own kind than not."""
    kind = kind_of(parameter)
    if rng.random() < 0.08:
        kind = rng.choice(["integer", "float", "text", "path"])
    if kind.startswith("int"):
        return rng.choice(WHOLE) if rng.random() < 0.8 else str(int(10 ** rng.uniform(0, 14)))
    if kind.startswith("float"):
        return rng.choice(REAL) if rng.random() < 0.7 else f"{10 ** rng.uniform(-12, 6):.6g}"
    if parameter.name == "assignments":
        return assignment(rng)
    if kind in ("path", "file", "directory") or parameter.name in (
        "ledger",
        "data_dir",
        "run",
        "folder",
        "key",
        "private_key",
    ):
        return rng.choice(PATHS)
    return rng.choice(WORDS) if rng.random() < 0.85 else rng.choice(PATHS)


def assignment(rng: random.Random) -> str:
    """A word for --set: mostly a field that exists, mostly with a value that does not fit."""
    from dpfy.core.settings import names
    from dpfy.training.config import SECTIONS

    if rng.random() < 0.1:
        return rng.choice(WORDS)
    section = rng.choice(sorted(SECTIONS))
    key = rng.choice(sorted(names(SECTIONS[section])))
    return f"{section}.{key}={rng.choice(rng.choice([WHOLE, REAL, WORDS, PATHS, TOML]))}"


def flag(rng: random.Random, parameter: Any) -> str:
    return rng.choice([*parameter.opts, *parameter.secondary_opts])


def line(rng: random.Random, path: tuple[str, ...], parameters: list[Any]) -> list[str]:
    """A command line for one verb."""
    options = {p.opts[0]: p for p in parameters if p.opts and p.opts[0].startswith("-")}
    places = [p for p in parameters if p.opts and not p.opts[0].startswith("-")]
    chosen = {name: text for name, text in BASE.get(path, {}).items() if name in options}
    given = list(GIVEN.get(path, []))
    extra: list[str] = []
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 5])):
        what = rng.random()
        if places and what < (0.5 if given or not options else 0.1):
            word = value(rng, rng.choice(places))
            given = [word, *given[1:]] if rng.random() < 0.7 else [*given, word]
        elif what < 0.9 and (names := [n for n in options if n != "--json"]):
            name = rng.choice(names)
            chosen[name] = (
                "" if getattr(options[name], "is_flag", False) else value(rng, options[name])
            )
            if (
                getattr(options[name], "is_flag", False)
                and options[name].secondary_opts
                and rng.random() < 0.5
            ):
                chosen.pop(name)
                extra.append(options[name].secondary_opts[0])
        elif what < 0.94 and chosen:
            chosen.pop(rng.choice(list(chosen)))
        else:
            extra.append(
                rng.choice(
                    ["--nosuch", "-x", "--help", "extra", "--", "--delta=", "--json", "-", "\udcff"]
                )
            )
    words = [*given]
    for name, text in chosen.items():
        words += (
            [name]
            if getattr(options[name], "is_flag", False)
            else [f"{name}={text}"]
            if text.startswith("-")
            else [name, text]
        )
    if rng.random() < 0.6 and "--" not in extra:
        words.append("--json")
    return [*path, *words, *extra]


def owned(path: tuple[str, ...], arguments: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(what a run may write, what a refused one may): its own outputs by their flags, `runs/` where
    it chooses itself, a ledger.
    """
    owns, keeps = [f"{FOLDER}/runs"], []
    for position, word in enumerate(arguments):
        name, _, text = word.partition("=")
        text = text or (arguments[position + 1] if position + 1 < len(arguments) else "")
        if name in OUTPUTS:
            owns += [_inside(text), _inside(text) + ".pub"]
        if name == "--ledger":
            keeps += [_inside(text), _inside(text) + ".head"]
        if (name, text.partition("=")[0]) == ("--set", "ledger.path"):
            ledger = text.partition("=")[2].strip("\"'")
            keeps += [_inside(ledger), _inside(ledger) + ".head"]
    if path == ("ledger", "create"):
        owns += [_inside(word) + end for word in arguments[len(path) :] for end in ("", ".head")]
    if path == ("init",):
        stems = [word.rpartition("/")[2].removesuffix(".gz") for word in arguments[len(path) :]]
        drafts = [
            f"{stem.rpartition('.')[0] or stem}.{end}.toml"
            for stem in stems
            for end in ("schema", "job")
        ]
        owns += [_inside(f"{place}/{draft}") for place in (".", "..") for draft in drafts]
    for word in arguments[len(path) :]:
        owns += [f"{_inside(word)}/{name}" for name in WRITTEN.get(path, ())]
        owns += [
            f"{_inside(word).rpartition('/')[0]}/{name}"
            for name in WRITTEN.get(path, ())
            if word.endswith(".json")
        ]
    return tuple(owns), tuple(keeps)


def _inside(text: str) -> str:
    import os.path

    return os.path.normpath(f"{FOLDER}/{text}")


def cases(seed: int) -> Iterator[Case]:
    """Endless; the k-th case of a seed is always the same."""
    known = verbs()
    paths = sorted(known)
    weights = [WEIGHT.get(path, 1) for path in paths]
    number = 0
    while True:
        rng = random.Random(f"{seed} {number}")
        number += 1
        if rng.random() < 0.02:
            yield Case(
                [
                    rng.choice([*WORDS, *WHOLE, "train", "audit", "compare", "--version", "--help"])
                    for _ in range(rng.randrange(3))
                ],
                FOLDER,
            )
            continue
        path = rng.choices(paths, weights)[0]
        arguments = line(rng, path, known[path])
        yield Case(arguments, FOLDER, *owned(path, arguments))
