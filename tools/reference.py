"""Pages made from the code: docs/configuration.md (every key of a job, a schema and a phase file)
and the API page of the site.

`python tools/reference.py` writes docs/configuration.md; `--check` says whether it is stale. The
API page is made when the site is built.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import dpfy
from dpfy.accounting import calculator, patterns
from dpfy.audit.job import AuditConfig
from dpfy.cli import fit, query, serve, serve_student, synthesize, texts
from dpfy.core import settings
from dpfy.data.config import FIELDS_OF_KIND
from dpfy.models.config import FIELDS_OF_MODEL
from dpfy.tables import columns
from dpfy.tables.schema import KINDS
from dpfy.training.config import FIELDS_OF_CLIP, SECTIONS

FORMS = {
    "query": query.QueryForm,
    "fit": fit.FitForm,
    "synthesize": synthesize.SynthesizeForm,
    "synthesize texts": texts.TextsForm,
    "synthesize tokenizer": texts.TokenizerForm,
    "serve start": serve.StartForm,
    "serve student": serve_student.StudentForm,
}
FAMILIES = (
    "dpfy.accounting",
    "dpfy.estimators",
    "dpfy.mechanisms",
    "dpfy.tables",
    "dpfy.testing",
    "dpfy.text",
    "dpfy.training",
)
"""Public modules beside `dpfy` itself, with a list of what they export."""

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
AGAIN = "python tools/reference.py"

SCHEMA_KEYS = {
    "missing": ("list of words", '`[""]`', "Cells that mean “no value”."),
    "strict": (
        "true or false",
        "`false`",
        "The data is clean: a cell that does not fit is an error.",
    ),
    "columns.NAME.kind": ("text", "must be given", f"What the column is: {', '.join(KINDS)}."),
    "columns.NAME.ignore": ("true", "none", "The column is never read. No other key goes with it."),
    "columns.NAME.range": (
        "[low, high]",
        "must be given",
        "Of a number or a date: values beyond it are moved to its end.",
    ),
    "columns.NAME.categories": (
        "list of words",
        "must be given",
        "Of a category; any other word is “other”.",
    ),
    "columns.NAME.classes": (
        "list of words",
        "must be given",
        "Of the label: at least two; the first is class 0.",
    ),
    "columns.NAME.fill": ("value", "none", "What a missing cell becomes (a category also: other)."),
    "columns.NAME.drop": ("true or false", "`false`", "Leave out rows where the cell is missing."),
    "columns.NAME.scale": (
        "text",
        '`"symmetric"`',
        f"Of a number: {', '.join(columns.SCALES)}; mapped to [-1, 1], or to [0, 1].",
    ),
    "columns.NAME.transform": (
        "text",
        '`"none"`',
        f"Of a number: {', '.join(columns.TRANSFORMS)}.",
    ),
    "columns.NAME.parts": (
        "list of words",
        "none: one number",
        f"Of a date, for learners and group-by: {', '.join(columns.PARTS)}.",
    ),
    "columns.NAME.buckets": (
        "whole number",
        "none",
        "Of a text or a long category: hashed features for learners.",
    ),
    "columns.NAME.bins": (
        "whole number, or list of edges",
        "up to 128 whole numbers each, else 32",
        "Of a number, for synthesis.",
    ),
    "columns.NAME.every": (
        "text",
        '`"month"`',
        f"Of a date, for synthesis: bins of a {', '.join(columns.EVERY)}.",
    ),
    "columns.NAME.ordered": (
        "true or false",
        "`false`",
        "Of a category or label, for synthesis: the order means something.",
    ),
    "columns.NAME.required": (
        "true or false",
        "`false`",
        "For synthesis: there is no cell for missing values.",
    ),
    "constraints": ("sections", "none", "For synthesis: rules that hold for every record."),
}
PHASE_KEYS = {
    "noise_multiplier": (
        "number",
        "must be given",
        "Noise of the phase, in units of the clip norm.",
    ),
    "sampling_rate": ("number", "`1.0`", "Probability that a record is in a batch."),
    "steps": ("whole number", "`1`", "Steps of the phase."),
    "sampling": ("text", '`"poisson"`', f"How batches are drawn: {', '.join(patterns.PATTERNS)}."),
    "records": (
        "whole number",
        "`0`: not given",
        "Number of records, where the sampling needs it.",
    ),
    "batch_size": (
        "whole number",
        "`0`: not given",
        "Size of a batch, where the sampling needs it.",
    ),
}
CHOICES = {
    "data": ("kind", FIELDS_OF_KIND),
    "model": ("name", FIELDS_OF_MODEL),
    "training": ("clip", FIELDS_OF_CLIP),
}
"""Keys that decide which others are read."""


def configuration() -> str:
    """The reference of all configuration keys, as Markdown."""
    assert set(PHASE_KEYS) == set(calculator.FIELDS)
    fields = {
        "range" if item.name in ("low", "high", "first", "last") else item.name
        for kind in KINDS.values()
        for item in dataclasses.fields(kind)
    }
    others = {"missing", "strict", "constraints", "kind", "ignore"}
    assert {key.rpartition(".")[2] for key in SCHEMA_KEYS} == others | fields - {"name"}
    lines = [
        "# Configuration reference",
        "",
        f"Every key of every file that dpfy reads. Made from the code (`{AGAIN}`); do not edit.",
        "",
        "## A job",
        "",
        "`dpfy train job.toml`; any key is also `--set section.key=value`, and `dpfy train "
        "--show-config` prints them with their values.",
        "A misspelt key is refused, and so is one that the chosen kind, model or clip rule does "
        "not read; all problems are listed at once.",
        "`dpfy init` drafts a job for a table ([tutorial](tutorials/tabular.md)).",
    ]
    for name, kind in (SECTIONS | {"audit": AuditConfig}).items():
        rows = [
            (f"`{item.name}`", _type(str(item.type)), _default(item), item.metadata["words"])
            for item in dataclasses.fields(kind)
        ]
        lines += ["", f"### [{name}]", "", _sentence(kind), "", *_table(rows)]
        if name in CHOICES:
            key, read = CHOICES[name]
            listed = "; ".join(
                f"`{choice}`: {', '.join(keys) or 'none'}" for choice, keys in read.items()
            )
            lines += ["", f"What each `{key}` reads besides: {listed}."]
    lines += [
        "",
        "## A schema",
        "",
        "What may be known of the columns of a table ([data](data.md)). `dpfy init` drafts one.",
    ]
    lines += ["", *_table([(f"`{key}`", *row) for key, row in SCHEMA_KEYS.items()])]
    lines += [
        "",
        "## Other commands that make a run",
        "",
        "A file of these keys is given as the first argument or with `--config`; any key is also "
        "`--set key=value`, and all but `parameters` are flags. The `config.toml` of a run folder "
        "is such a file, without the names of private files.",
    ]
    for name, kind in FORMS.items():
        rows = [
            (f"`{item.name}`", _type(str(item.type)), _form_default(item), item.metadata["words"])
            for item in dataclasses.fields(kind)
            if not item.metadata.get("hidden")
        ]
        lines += ["", f"### dpfy {name}", "", *_table(rows)]
    lines += [
        "",
        "## A phase file",
        "",
        "One `[[phase]]` table for each phase, for `dpfy plan account --phases` "
        "([accounting](accounting.md)).",
    ]
    lines += ["", *_table([(f"`{key}`", *row) for key, row in PHASE_KEYS.items()])]
    return "\n".join(lines) + "\n"


def _sentence(kind: type) -> str:
    """The first paragraph of what a section says of itself, without its own name."""
    words = (
        re.sub(r"^\[\w+\]: ", "", inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
    )
    return words[0].upper() + words[1:]


def _type(written: str) -> str:
    words = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}
    parts = [part.strip() for part in written.split("|") if part.strip() != "None"]
    named = [
        "list of " + words.get(found[1], found[1]) + "s"
        if (found := re.match(r"tuple\[(\w+)", part))
        else words.get(part, part)
        for part in parts
    ]
    return " or ".join(named)


def _default(item: dataclasses.Field[Any]) -> str:
    if item.metadata["otherwise"]:
        return str(item.metadata["otherwise"])
    return "none" if item.default is None else f"`{settings.toml(item.default)}`"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    cells = [
        [cell.replace("|", "\\|") for cell in row]
        for row in [("key", "type", "default", "what it is"), ("---",) * 4, *rows]
    ]
    return ["| " + " | ".join(row) + " |" for row in cells]


def api() -> str:
    """The reference of the Python interface, as Markdown: every public name with its signature and
    its docstring.
    """
    lines = [
        "# Python interface",
        "",
        "Every name of `import dpfy`, made from the docstrings. *Guarantees* name what tests hold.",
        "",
    ]
    for name in sorted(dpfy.__all__, key=str.lower):
        lines += _entry(f"dpfy.{name}", getattr(dpfy, name))
    for family in FAMILIES:
        module = importlib.import_module(family)
        lines += [f"## The family {family}", "", _first(module), ""]
        for name in sorted(set(module.__all__), key=str.lower):
            found = getattr(module, name)
            if inspect.isclass(found) or inspect.isroutine(found):
                lines += _entry(f"{family}.{name}", found)
    lines += ["## Further modules", ""]
    for name in ("dpfy.data.source", "dpfy.integrations"):
        lines += [f"**`{name}`**: {_first(importlib.import_module(name))}", ""]
    return "\n".join(lines)


def _entry(name: str, found: Any) -> list[str]:
    lines = [
        f"## {name}",
        "",
        "```python",
        f"{name}{_signature(found, broken=True)}",
        "```",
        "",
        *_doc(found),
    ]
    if inspect.isclass(found) and not issubclass(found, Exception):
        for key, member in sorted(vars(found).items()):
            target = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if key.startswith("_") or not (
                inspect.isfunction(target) or isinstance(target, property)
            ):
                continue
            shown = "" if isinstance(target, property) else _signature(target)
            lines += [f"**`{key}{shown}`**", "", *_doc(target)]
    return lines


def _signature(found: Any, broken: bool = False) -> str:
    """How it is called, as one would write it; if `broken`, a long one over several lines."""
    if inspect.isclass(found) and issubclass(found, enum.Enum):
        return ""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return ""
    words, star = [], False
    for item in signature.parameters.values():
        if item.name in ("self", "cls"):
            continue
        if item.kind is item.KEYWORD_ONLY and not star:
            words.append("*")
        star = star or item.kind in (item.KEYWORD_ONLY, item.VAR_POSITIONAL)
        words.append(_parameter(item))
    back = (
        ""
        if signature.return_annotation in (signature.empty, "None", None)
        else f" -> {_annotation(signature.return_annotation)}"
    )
    line = f"({', '.join(words)}){back}"
    return (
        line
        if not broken or len(line) < 90
        else "(\n" + "".join(f"    {word},\n" for word in words) + f"){back}"
    )


def _parameter(item: inspect.Parameter) -> str:
    mark = {item.VAR_POSITIONAL: "*", item.VAR_KEYWORD: "**"}.get(item.kind, "")
    kind = "" if item.annotation is item.empty else f": {_annotation(item.annotation)}"
    if item.default is item.empty:
        return f"{mark}{item.name}{kind}"
    value = item.default.value if isinstance(item.default, enum.Enum) else item.default
    shown = repr(value) if len(repr(value)) <= 24 and " at 0x" not in repr(value) else "..."
    return f"{mark}{item.name}{kind} = {shown}"


def _annotation(found: Any) -> str:
    return found if isinstance(found, str) else getattr(found, "__name__", str(found))


def _doc(found: Any) -> list[str]:
    text = inspect.getdoc(found) or ""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    text = re.sub(r"^( {4,}\S.*)$", lambda m: m[1], text, flags=re.MULTILINE)
    return [text.replace("``", "`"), ""]


def _first(found: Any) -> str:
    return " ".join((inspect.getdoc(found) or "").split("\n\n")[0].split())


def _form_default(item: dataclasses.Field[Any]) -> str:
    if item.default is dataclasses.MISSING:
        return "none" if item.metadata.get("rest") else "must be given"
    return _default(item)


def main(arguments: list[str]) -> int:
    """Write the page, or with --check compare it."""
    made = configuration()
    if "--check" in arguments:
        stale = PAGE.read_text("utf-8") != made
        print(
            f"docs/configuration.md is stale: {AGAIN}"
            if stale
            else "docs/configuration.md is as the code says"
        )
        return int(stale)
    PAGE.write_text(made, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
