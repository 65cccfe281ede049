"""Configurations: sections that are frozen dataclasses, given as TOML and as `section.key=value`
words, shown with what each field is.

A configuration is a frozen dataclass whose fields are sections; a section is a frozen dataclass
whose fields are made by `setting`. The sections check their own values; here only names are
checked, so that nothing misspelt is swallowed.
"""

from __future__ import annotations

import datetime
import inspect
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any

from dpfy.core import check, errors, storage
from dpfy.core.errors import InvalidInput

Sections = Mapping[str, type]
Raw = dict[str, dict[str, Any]]
Related = Mapping[str, Collection[str]]
MOST_VALUE = 1 << 16
"""No value on a command line is longer than this."""


def setting(default: Any, words: str, otherwise: str = "") -> Any:
    """A field of a section: its default, what it is, and what holds where it is not given (default
    None).
    """
    return field(default=default, metadata={"words": words, "otherwise": otherwise})


def read(sections: Sections, path: Path) -> Raw:
    """The sections of a TOML file, names checked, values not yet."""
    raw, found = parsed(sections, path)
    errors.raise_all(found)
    return raw


def parsed(sections: Sections, path: Path) -> tuple[Raw, list[InvalidInput]]:
    """The sections and keys of a TOML file that are known, values not yet checked; and what is
    wrong with the others.
    """
    raw, found, known = storage.toml("config", path), [], {}
    for name, section in raw.items():
        if wrong := errors.attempted(check.known_keys, "", [name], sections):
            found += wrong
        elif not isinstance(section, dict):
            found.append(InvalidInput(name, section, f"must be a section: [{name}]"))
        else:
            allowed = names(sections[name])
            for key in section:
                found += errors.attempted(check.known_keys, name, [key], allowed)
            known[name] = {key: value for key, value in section.items() if key in allowed}
    return known, found


def merged(
    sections: Sections,
    raw: Mapping[str, Mapping[str, Any]],
    flags: Mapping[str, Any],
    exclusive: Related,
) -> Raw:
    """The values of a file with those of a command line over them. A field that is given there
    replaces its alternatives in the file.
    """
    whole: Raw = {name: dict(raw.get(name, {})) for name in sections}
    for key, value in flags.items():
        section, _, name = key.partition(".")
        if value is not None:
            for other in exclusive.get(key, ()):
                if flags.get(f"{section}.{other}") is None:
                    whole[section].pop(other, None)
            whole[section][name] = value
    return whole


def assembled(
    whole: type, sections: Sections, values: Raw, decisive: Related
) -> tuple[Any, list[InvalidInput]]:
    """The configuration of these values, None if there is none, and everything that is wrong with
    them.
    """
    parts, found = {}, list[InvalidInput]()
    for name, given in values.items():
        listed = {key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}
        parts[name], wrong = built(name, sections[name], listed, decisive)
        found += wrong
    if found:
        return None, found
    try:
        return whole(**parts), []
    except InvalidInput as problem:
        return None, list(errors.each(problem))


def built(
    section: str, kind: type, values: Mapping[str, Any], decisive: Related
) -> tuple[Any, list[InvalidInput]]:
    """The section of these values, and all that is wrong with them: what breaks a rule is left out,
    and the rest is tried again.

    `decisive`: keys (``section.key``) on which rules of others depend; while one is wrong, nothing
    is said about those.
    """
    left, found = dict(values), list[InvalidInput]()
    while True:
        try:
            return kind(**left), found
        except InvalidInput as problem:
            found += errors.each(problem)
            key = found[-1].field.removeprefix(f"{section}.").partition("[")[0]
            if key not in left:
                return None, found
            for other in (key, *decisive.get(f"{section}.{key}", ())):
                left.pop(other, None)


def names(section: type) -> dict[str, Field[Any]]:
    """The fields of a section."""
    return {f.name: f for f in fields(section)}


def assigned(sections: Sections, words: Iterable[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """All fields (``section.key``) that a command line gives, by flags of its own (None: not given)
    and by `--set` words.

    Guarantees: an unknown section or key is refused with the nearest known one; so is a field that
    is given twice.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    for word in words:
        key, equals, text = word.partition("=")
        section, dot, name = key.strip().partition(".")
        if not equals or not dot:
            owners = [
                f"{s}.{section}" for s, kind in sections.items() if section in names(kind)
            ] or ["training.optimizer"]
            raise InvalidInput(
                "--set", word, f"must be section.key=value, as in --set {owners[0]}=..."
            )
        check.one_of("--set section", section, sections)
        check.one_of(f"--set {section}", name, names(sections[section]))
        if f"{section}.{name}" in given:
            raise InvalidInput(
                "--set", word, f"{section}.{name} is given twice on the command line; give it once"
            )
        given[f"{section}.{name}"] = value(
            f"--set {section}.{name}", text, names(sections[section])[name]
        )
    return given


def value(name: str, text: str, into: Field[Any]) -> Any:
    """The value of a word: TOML, or plain text where it is none, or where the field takes text and
    no such number.

    A date is text: no field is a date.
    """
    if not text.strip() or len(text) > MOST_VALUE:
        raise InvalidInput(name, text, f"must be a value of 1 to {MOST_VALUE} characters")
    try:
        found = storage.parsed_toml(name, text, f"value = {text}")
    except InvalidInput:
        return text
    if set(found) != {"value"} or not _may_be(found["value"], str(into.type)):
        return text
    return found["value"]


def _may_be(found: Any, kind: str) -> bool:
    """Whether a TOML value, rather than the text it was read from, is meant for a field of this
    type.
    """
    if isinstance(found, datetime.date | datetime.time):
        return False
    whole = "int" in kind and isinstance(found, int) and not isinstance(found, bool)
    several = "tuple" in kind or "list" in kind
    return isinstance(found, str) or "str" not in kind or several or whole


def parts(config: Any) -> dict[str, Any]:
    """The sections of a configuration: those of its own class, then those of what it extends."""
    kinds = [inspect.get_annotations(kind) for kind in type(config).__mro__]
    known = {f.name for f in fields(config)}
    return {name: getattr(config, name) for kind in kinds for name in kind if name in known}


def as_json(config: Any) -> Raw:
    """Every field of every section; None where nothing is given."""
    return {
        name: {f.name: getattr(part, f.name) for f in fields(part)}
        for name, part in parts(config).items()
    }


def commented(config: Any) -> str:
    """The whole configuration as TOML: each field with what it is and its default; one that is not
    given as a comment.

    Guarantees: read back, it gives an equal configuration.
    """
    lines: list[str] = []
    for section, held in parts(config).items():
        lines.append(f"[{section}]")
        for item in fields(held):
            found = getattr(held, item.name)
            lines.append(f"# {item.metadata['words']} Default: {_default(item)}.")
            lines.append(f"# {item.name} =" if found is None else f"{item.name} = {toml(found)}")
        lines.append("")
    return "\n".join(lines)


def whole(config: Any, private: Collection[tuple[str, str]] = ()) -> str:
    """The whole configuration as TOML, without what is not given. The paths in `private` fields
    (section, name) are cut to their last part: a run folder holds no absolute path.
    """
    lines = ["# Paths are shortened to their last part."] if private else []
    for section, values in as_json(config).items():
        lines.append(f"[{section}]")
        for name, value in values.items():
            if value is not None:
                shown = Path(value).name if (section, name) in private else value
                lines.append(f"{name} = {toml(shown)}")
        lines.append("")
    return "\n".join(lines)


def _default(item: Field[Any]) -> str:
    return item.metadata["otherwise"] or ("none" if item.default is None else toml(item.default))


def toml(found: Any) -> str:
    """A value as TOML."""
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, str):
        return json.dumps(found, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(found, tuple | list):
        return "[" + ", ".join(toml(v) for v in found) + "]"
    return repr(found)


def text(name: str, found: object, rule: str = "must be text") -> str:
    """A text that a file can hold."""
    try:
        if isinstance(found, str) and found and found.encode() and "\0" not in found:
            return found
    except UnicodeEncodeError:
        rule = "must be a name that UTF-8 can hold"
    raise InvalidInput(name, found, rule)
