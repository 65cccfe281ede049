"""A command as one frozen dataclass: its fields are its flags, the keys of `--set` and of TOML, and
what the reference lists. What a run was asked for is written into its folder, and can be given back
to its command: `dpfy query people.csv --schema s.toml --config runs/x/config.toml`.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Generic, TypeVar, get_args, get_type_hints

import typer

from dpfy.cli import options

F = TypeVar("F")
RULE = "from --records or the ledger, else 1e-6"
"""The default of --delta."""
LAST = ("ledger", "budget")
"""Flags that are listed after the others."""


def flag(words: str, default: Any = MISSING, otherwise: str = "", **more: Any) -> Any:
    """A field that is a flag. Without a default it must be given.

    Args:
        words: What it is.
        default: Its default.
        otherwise: What holds where it is not given.
        more: `metavar`; `placed`, of a positional argument; `path`, of what is never published;
            `hidden`; `passing`, of what is no part of the run and is not kept with it;
            `rest`, of the field that takes all other keys; `key`, of what the flag is called in the
            configuration of a job.
    """
    about = {"words": words, "otherwise": otherwise, **more}
    return field(default=default, metadata=about, kw_only=True)


@dataclass(frozen=True)
class RunForm:
    """What every command takes that makes a run."""

    ledger: str | None = flag("Ledger of the data set, over all its releases.", None, path=True)
    budget: float | None = flag("Epsilon that all runs of the ledger may spend.", None)
    insecure_seed: int | None = flag(
        "Fix all randomness, for tests: protects nothing.", None, hidden=True, path=True
    )


@dataclass(frozen=True)
class TableRunForm(RunForm):
    """What every command takes that makes a run of a private table."""

    data: str = flag("The private table: CSV or Parquet.", metavar="DATA", placed=True, path=True)
    schema: str = flag("Public schema of the columns (TOML), or adult.", path=True)
    person: str | None = flag("Column with the person that a row belongs to.", None)
    at_most: int | None = flag("Most rows of one person that are used.", None)


@dataclass(frozen=True)
class JobForm(RunForm):
    """What every command takes that does a whole job: flags that win over its configuration."""

    data: str | None = flag(
        "A file (.csv, .parquet, .npz), embedded, mnist, cifar10, ..., or a configuration (.toml).",
        None,
        metavar="DATA",
        placed=True,
    )
    schema: str | None = flag("Public schema of a table (TOML).", None, key="data.schema")
    person: str | None = flag(
        "Column with the person that a row belongs to.", None, key="data.user"
    )
    at_most: int | None = flag(
        "Most rows of one person that are used.", None, key="data.most_records"
    )
    records: str | None = flag("Public number of records to train on.", None, key="privacy.records")
    model: str | None = flag("scattering-linear, linear, mlp, ...", None, key="model.name")
    epsilon: float | None = flag(
        "Epsilon to reach (default 3; labels: 1).", None, key="privacy.epsilon"
    )
    delta: float | None = flag("Delta.", None, "from --records", key="privacy.delta")
    ledger: str | None = flag(
        "Ledger of the data set, over all its releases.", None, key="ledger.path"
    )
    budget: float | None = flag(
        "Epsilon that all runs may spend.", None, key="ledger.budget_epsilon"
    )


@dataclass(frozen=True)
class AskedJob(Generic[F]):
    """A job as it was given: its flags, the configuration they win over, and where its run lives."""

    form: F
    config: Path | None
    words: tuple[str, ...]
    out: Path | None
    resume: bool
    show: bool
    as_json: bool

    @property
    def seed(self) -> int | None:
        """What fixes all randomness, for tests."""
        form: Any = self.form
        seed: int | None = form.insecure_seed
        return seed

    def flags(self) -> dict[str, Any]:
        """The fields of the configuration that flags give, and where the data are."""
        from dpfy.data.config import KINDS

        form: Any = self.form
        found = {
            f.metadata["key"]: getattr(form, f.name) for f in fields(form) if "key" in f.metadata
        }
        found = {key: value for key, value in found.items() if value is not None}
        text = found.get("privacy.records")
        if isinstance(text, str) and text.isdecimal() and len(text) < 19:
            found["privacy.records"] = int(text)  # any other text is the configuration's to judge
        if (data := form.data) is not None:
            named = data in KINDS or not (Path(data).suffix or Path(data).exists())
            found["data.kind" if named else "data.path"] = data
        return found

    def fields(self, sections: Mapping[str, type]) -> dict[str, Any]:
        """All fields of the configuration that the command line gives, also by `--set`."""
        from dpfy.core import settings

        return settings.assigned(sections, self.words, self.flags())

    def folder(self) -> Path:
        """The run folder."""
        from dpfy.runs.run import fresh_path

        return self.out or fresh_path()

    def tell(self, whole: Any) -> None:
        """Show a whole configuration (`--show-config`)."""
        from dpfy.cli.output import tell
        from dpfy.core import settings

        tell(settings.as_json(whole), settings.commented(whole), as_json=self.as_json)


@dataclass(frozen=True)
class Asked(Generic[F]):
    """A command as it was given: its form, and where its run lives."""

    form: F
    out: Path
    resume: bool
    as_json: bool

    def run(self, **more: Any) -> Any:
        """The `dpfy.Run`."""
        from dpfy.runs.run import Run

        form: Any = self.form
        texts = (as_toml(form, publish=True), as_toml(form))
        given = {"seed": form.insecure_seed, "config": texts, "budget": self._budget()}
        return Run(self.out, self.resume, form.ledger, **given, **more)

    def delta(self, default: float | None = None) -> float:
        """Delta by the rule of all commands: as given, or from --records and the budget."""
        from dpfy.runs.dataset import DELTA, delta_of, ledger_delta

        form: Any = self.form
        records, least = getattr(form, "records", None), DELTA if default is None else default
        return delta_of(form.delta, records, ledger_delta(form.ledger), least).value

    def _budget(self) -> Any:
        """The budget that the ledger is made with; its delta is that of the run."""
        from dpfy.report import figures
        from dpfy.runs.dataset import DELTA, ledger_delta

        form: Any = self.form
        if form.budget is None:
            return None
        path = None if form.ledger is None else Path(form.ledger)
        delta = ledger_delta(path) or self.delta() or DELTA
        return figures.new_budget(path, form.budget, delta)

    def again(self, *words: str) -> str:
        """The same command, to be given again."""
        form: Any = self.form
        named, placed = [], []
        for key, value in _given(form).items():
            about = form.__dataclass_fields__.get(key)
            if about is None:
                named += ["--set", lines({key: value}).strip()]
            elif about.metadata.get("placed"):
                placed.append(str(value))
            else:
                named += _words(key, value)
        return shlex.join(["dpfy", *words, *placed, *named])


def command(
    kind: type[F], *, goes_on: bool = False
) -> Callable[[Callable[[Asked[F]], None]], Callable[..., None]]:
    """The function of a command that is given its form, as Typer reads it. `goes_on`: a run that is
    in the folder and has not ended goes on, also without --resume.
    """

    def decorated(body: Callable[[Asked[F]], None]) -> Callable[..., None]:
        def called(**given: Any) -> None:
            where = {name: given.pop(name) for name in ("out", "resume", "as_json")}
            show = given.pop("show_config")
            where["resume"] |= goes_on and options.holds_run(where["out"])
            out = where["out"] if show else options.run_folder(where["out"], where["resume"])
            form = read(kind, given, out if where["resume"] else None, partial=show)
            if show:
                from dpfy.cli.output import tell

                tell(_given(form), lines(_given(form)), as_json=where["as_json"])
                return
            body(Asked(form, out, where["resume"], where["as_json"]))

        return _as_typer_reads(called, kind, body)

    return decorated


def job(kind: type[F]) -> Callable[[Callable[[AskedJob[F]], None]], Callable[..., None]]:
    """The function of a command that does a whole job, as Typer reads it."""

    def decorated(body: Callable[[AskedJob[F]], None]) -> Callable[..., None]:
        def called(**given: Any) -> None:
            from dpfy.core.errors import InvalidInput

            named = ("config", "assignments", "out", "resume", "show_config", "as_json")
            config, words, out, resume, show, as_json = (given.pop(name) for name in named)
            if str(given["data"]).endswith(".toml"):
                if config is not None:
                    rule = "is given already as the first argument"
                    raise InvalidInput("--config", str(config), rule)
                config, given["data"] = Path(given["data"]), None
            if resume and out is None:
                raise InvalidInput("--resume", True, "needs --out, the folder of the run to resume")
            form = kind(**{name: value for name, value in given.items() if value is not None})
            body(AskedJob(form, config, tuple(words or ()), out, resume, show, as_json))

        return _as_typer_reads(called, kind, body)

    return decorated


def _as_typer_reads(
    called: Callable[..., None], kind: type, body: Callable[..., None]
) -> Callable[..., None]:
    called.__signature__ = inspect.Signature(_parameters(kind))  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in _parameters(kind)}
    called.__doc__, called.__name__ = body.__doc__, body.__name__
    return called


def _parameters(kind: type) -> list[inspect.Parameter]:
    """What Typer reads: arguments, then flags, own ones before those that all have. A job's common
    fields come first; where a run is charged comes last.
    """
    hints = get_type_hints(kind)
    found: list[inspect.Parameter] = []
    own = [f for f in fields(kind) if f.name in kind.__annotations__]  # type: ignore[arg-type]
    shared = [f for f in fields(kind) if f not in own]  # type: ignore[arg-type]
    placed = [f for f in (*shared, *own) if f.metadata.get("placed")]
    inner = (*shared, *own) if issubclass(kind, JobForm) else (*own, *shared)
    for item in (*placed, *sorted(inner, key=lambda f: f.name in LAST)):
        about = item.metadata
        if about.get("rest") or (item in placed and item.name in [p.name for p in found]):
            continue
        default = item.default if item.default not in (MISSING, None) else ""
        shown = about["otherwise"] or (f"{default:g}" if isinstance(default, float) else default)
        told = typer.Argument if item in placed else typer.Option
        more: dict[str, Any] = {"metavar": about["metavar"]} if "metavar" in about else {}
        info = told(
            *(() if item in placed else (_flag(item.name),)),
            help=about["words"] + _aside(item, shown),
            show_default=False,
            hidden=about.get("hidden", False),
            **more,
        )
        kinds = [part for part in _kinds(hints[item.name]) if part is not type(None)]
        found.append(_parameter(item.name, Annotated[kinds[0] | None, info], None))
    config = options.option("Configuration (TOML), for other fields.", "--config")
    words = typer.Option("--set", metavar="KEY=VALUE", help="Any field; repeat it.")
    for name, hint, default in (
        ("out", options.Out, None),
        ("resume", options.Resume, False),
        ("config", Annotated[Path | None, config], None),
        ("assignments", Annotated[list[str] | None, words], None),
        ("show_config", options.ShowConfig, False),
        ("as_json", options.Json, False),
    ):
        found.append(_parameter(name, hint, default))
    return found


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _words(name: str, value: Any) -> list[str]:
    """How a command line gives a field."""
    if isinstance(value, bool):
        return [_flag(name)] * value
    values = value if isinstance(value, list | tuple) else [value]
    return [word for one in values for word in (_flag(name), str(one))]


def _aside(item: Field[Any], shown: Any) -> str:
    if item.default is MISSING:
        return " (required)"
    return "" if shown == "" else f" (default: {shown})"


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=hint, default=default
    )


def read(kind: type[F], given: Mapping[str, Any], stored: Path | None, partial: bool = False) -> F:
    """The form of a command line: its flags and `--set` words, over a configuration, over what a
    run in the folder `stored` was asked for.

    Raises:
        InvalidInput: A key is unknown or given twice, a value is of another type, or a field that
            must be given is missing. `partial` forgives the last.
    """
    from dpfy.core import errors, storage
    from dpfy.core.errors import InvalidInput
    from dpfy.runs.mark import HIDDEN, refuse_planted

    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    flags = {k: v for k, v in given.items() if k in known and v is not None}
    config = given.get("config")
    if str(flags.get("data", "")).endswith(".toml"):
        if config is not None:
            rule = "is given already as the first argument"
            raise InvalidInput("--config", str(config), rule)
        config = Path(flags.pop("data"))
    values: dict[str, Any] = {}
    for folder in () if stored is None else (stored, stored / HIDDEN):
        if (folder / "config.toml").is_file():
            refuse_planted(stored or folder)
            values |= storage.toml("config", folder / "config.toml")
    values |= {} if config is None else storage.toml("config", config)
    rest = next((name for name, f in known.items() if f.metadata.get("rest")), None)
    words: dict[str, Any] = {}
    for text in given.get("assignments") or ():
        key, value = _assigned(text, known)
        if key in flags or key in words:
            raise InvalidInput("--set", text, f"{key} is given twice; give it once")
        words[key] = value
    whole, others, found = {}, {}, list[InvalidInput]()
    hints = get_type_hints(kind)
    for key, value in (values | words | flags).items():
        name = f"--set {key}" if key in words else f"config {key}"
        if key not in known or key == rest:
            if rest is None or key == rest:
                found += errors.attempted(_unknown, name, key, [*known])
            others[key] = value
        elif key in flags or _fits(value, hints[key]):
            whole[key] = value
        else:
            found.append(InvalidInput(name, value, f"must be {_called(hints[key])}"))
    for name, item in known.items():
        if name not in whole and item.default is MISSING and name != rest:
            said = item.metadata["metavar"] if item.metadata.get("placed") else _flag(name)
            if partial:
                whole[name] = None
            else:
                found.append(InvalidInput(said, None, "must be given"))
    errors.raise_all(found)
    return kind(**whole, **({} if rest is None else {rest: others}))


def _assigned(text: str, known: Mapping[str, Field[Any]]) -> tuple[str, Any]:
    """A word of `--set`: a value as TOML, or plain text where it is none."""
    from dpfy.core import settings, storage
    from dpfy.core.errors import InvalidInput

    key, equals, written = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise InvalidInput("--set", text, "must be key=value")
    if key in known:
        return key, settings.value(f"--set {key}", written, known[key])
    try:
        return key, storage.parsed_toml("--set", text, f"value = {written}")["value"]
    except (InvalidInput, KeyError):
        return key, written


def _unknown(name: str, key: str, known: list[str]) -> None:
    from dpfy.core import check

    check.one_of(name, key, known)


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    kinds = _kinds(hint)
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, list):
        return list[str] in kinds and all(isinstance(one, str) for one in value)
    plain = tuple(kind for kind in kinds if isinstance(kind, type) and kind != list[str])
    return isinstance(value, plain) or (isinstance(value, int) and float in kinds)


def _called(hint: Any) -> str:
    words: dict[Any, str] = {float: "a number", int: "a whole number", str: "text"}
    words |= {bool: "true or false", list[str]: "a list of texts"}
    return " or ".join(words[kind] for kind in _kinds(hint) if kind in words)


def _given(form: Any) -> dict[str, Any]:
    """Every field that says something, those of the rest by their own names."""
    found: dict[str, Any] = {}
    for item in fields(form):
        value = getattr(form, item.name)
        if item.metadata.get("rest"):
            found |= value
        elif value is not None:
            found[item.name] = value
    return found


def as_toml(form: Any, *, publish: bool = False) -> str:
    """The form as TOML; with `publish` without the names of private files."""
    marks = ("passing", "path") if publish else ("passing",)
    hidden = {f.name for f in fields(form) if any(map(f.metadata.get, marks))}
    return lines({key: value for key, value in _given(form).items() if key not in hidden})


def lines(given: Mapping[str, Any]) -> str:
    """Values as TOML; what is None is left out."""
    from dpfy.core import settings

    return "".join(f"{k} = {settings.toml(v)}\n" for k, v in given.items() if v is not None)
