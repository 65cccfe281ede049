"""What to load: one frozen value, all of it public. It becomes the [data] section of a configuration file."""

from __future__ import annotations

from dataclasses import dataclass

from dpfy.core import check
from dpfy.core.errors import InvalidInput

FIELDS_OF_KIND: dict[str, tuple[str, ...]] = {
    "embedded": (),
    "digits": ("test_fraction",),
    "mnist": ("dir",),
    "fashion-mnist": ("dir",),
    "adult": ("dir", "test_fraction"),
    "shakespeare": ("dir", "length", "test_fraction"),
    "idx": ("path", "labels_path", "test_path", "test_labels_path", "classes", "test_fraction"),
    "npz": ("path", "test_path", "classes", "range", "test_fraction"),
    "csv": ("path", "test_path", "schema", "test_fraction"),
    "parquet": ("path", "test_path", "schema", "test_fraction"),
    "text": ("path", "test_path", "length", "test_fraction"),
}
"""Which fields each kind of source reads. A field set for a kind that ignores it is an error: nothing is swallowed."""

KINDS = tuple(FIELDS_OF_KIND)
OF_EVERY_KIND = ("kind", "test")
KNOWN = ("embedded", "digits", "mnist", "fashion-mnist", "adult", "shakespeare")
"""Public data sets: what is measured on their held-out part may be published unless the user says otherwise."""
TESTS = ("public", "billed", "withheld")
REQUIRED = {"idx": ("path", "labels_path", "classes"), "npz": ("path", "classes"), "csv": ("path", "schema"),
            "parquet": ("path", "schema"), "text": ("path",)}  # fmt: skip


@dataclass(frozen=True)
class DataConfig:
    """A source of records by name, and the public facts that the data must not be asked for.

    kind: one of KINDS. dir: folder that holds `mnist/`, `adult/`... (otherwise the environment's DPFY_DATA).
    path, labels_path, test_path, test_labels_path: files. schema: TOML file, or the name of a packaged one ("adult").
    classes: number of classes (idx, npz). range: (low, high) that floating-point NPZ features are clamped to and scaled from.
    test_fraction: share held out by a fixed public permutation when there is no test file. length: characters in a text record.
    test: what the held-out records are: "public" (figures are published as measured), "billed" (private: noisy counts, paid for in the
    ledger) or "withheld" (nothing is measured). Without it: public for the public data sets, withheld for a file of the user's own.
    """

    kind: str = "embedded"
    dir: str | None = None
    path: str | None = None
    labels_path: str | None = None
    test_path: str | None = None
    test_labels_path: str | None = None
    schema: str | None = None
    classes: int | None = None
    range: tuple[float, float] | None = None
    test_fraction: float = 0.2
    length: int = 128
    test: str | None = None

    @property
    def test_use(self) -> str:
        """What may be told about the held-out records."""
        return self.test or ("public" if self.kind in KNOWN else "withheld")

    def __post_init__(self) -> None:
        check.one_of("data.kind", self.kind, KINDS)
        self._check_strings()
        check.inside_unit("data.test_fraction", self.test_fraction)
        check.integer("data.length", self.length, least=2)
        if self.classes is not None:
            check.integer("data.classes", self.classes, least=2)
        if self.range is not None:
            object.__setattr__(self, "range", interval("data.range", self.range))
        if self.test is not None:
            check.one_of("data.test", self.test, TESTS)
        self._check_fields_fit_the_kind()

    def _check_strings(self) -> None:
        for name in ("dir", "path", "labels_path", "test_path", "test_labels_path", "schema"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidInput(f"data.{name}", value, "must be a path as text")

    def _check_fields_fit_the_kind(self) -> None:
        for name in REQUIRED.get(self.kind, ()):
            if getattr(self, name) is None:
                rule = f"must be given for kind {self.kind!r}: it is never guessed from the data"
                raise InvalidInput(f"data.{name}", None, rule)
        for name, field in self.__dataclass_fields__.items():
            if name not in (*OF_EVERY_KIND, *FIELDS_OF_KIND[self.kind]) and getattr(self, name) != field.default:
                allowed = ", ".join(FIELDS_OF_KIND[self.kind]) or "no other field"
                rule = f"kind {self.kind!r} does not read it (it reads: {allowed})"
                raise InvalidInput(f"data.{name}", getattr(self, name), rule)
        if self.kind == "idx" and (self.test_path is None) != (self.test_labels_path is None):
            raise InvalidInput("data.test_labels_path", self.test_labels_path, "must be given together with test_path")


def interval(name: str, value: object) -> tuple[float, float]:
    """A pair (low, high) with low < high."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidInput(name, value, "must be two numbers: [low, high]")
    low, high = check.real(f"{name}[0]", value[0]), check.real(f"{name}[1]", value[1])
    if not low < high:
        raise InvalidInput(name, value, "low must be less than high")
    return low, high
