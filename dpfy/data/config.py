"""What to load: one frozen value, all of it public. It becomes the [data] section of a
configuration file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from dpfy.core import check, errors
from dpfy.core.check import interval
from dpfy.core.errors import InvalidInput
from dpfy.core.settings import setting, text
from dpfy.core.unit import EXAMPLE, TOKEN_WINDOW, WINDOWS, Unit, owner_columns, user_unit

OF_USERS = ("user", "most_records", "pick", "user_loss", "draw", "time", "window")
"""Fields about whose records are: of kinds that can say it."""
FIELDS_OF_KIND: dict[str, tuple[str, ...]] = {
    "embedded": (),
    "digits": ("test_fraction",),
    "mnist": ("dir", *OF_USERS),
    "fashion-mnist": ("dir",),
    "cifar10": ("dir",),
    "cifar100": ("dir",),
    "adult": ("dir", "test_fraction"),
    "shakespeare": ("dir", "length", "test_fraction"),
    "idx": ("path", "labels_path", "test_path", "test_labels_path", "classes", "test_fraction"),
    "npz": ("path", "test_path", "classes", "range", "test_fraction", *OF_USERS),
    "images": ("path", "test_path", "names", "size", "test_fraction"),
    "csv": ("path", "test_path", "schema", "test_fraction", *OF_USERS),
    "parquet": ("path", "test_path", "schema", "test_fraction", *OF_USERS),
    "text": ("path", "test_path", "length", "test_fraction"),
}
"""Which fields each kind of source reads. A field set for a kind that ignores it is an error:
nothing is swallowed.
"""

KINDS = tuple(FIELDS_OF_KIND)
OF_EVERY_KIND = ("kind", "test")
KNOWN = (
    "embedded",
    "digits",
    "mnist",
    "fashion-mnist",
    "cifar10",
    "cifar100",
    "adult",
    "shakespeare",
)
"""Public data sets: what is measured on their held-out part may be published unless the user says
otherwise.
"""
TESTS = ("public", "billed", "withheld")
RANDOM, FIRST = PICKS = ("random", "first")
"""Which records of a user with more than may be used: others at every participation, or always the
first.
"""
SUM, MEAN = USER_LOSSES = ("sum", "mean")
"""The loss of a user: the sum over the records taken, or their mean, so that every user weighs the
same.
"""
USER, RECORD = DRAWS = ("user", "record")
"""What is drawn and clipped: users whole, or single records."""
MOST_RECORDS = 1 << 20
"""Of one user: as many places are held in memory for every user."""
REQUIRED = {"idx": ("path", "labels_path", "classes"), "npz": ("path", "classes"), "csv": ("path", "schema"),
            "images": ("path", "names", "size"), "parquet": ("path", "schema"), "text": ("path",)}  # fmt: skip
HINTS = dict.fromkeys(("csv", "parquet"), " (dpfy init FILE drafts schema and job)")
SUFFIXES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".npz": "npz",
    ".txt": "text",
}
"""What a file is by its name, where the configuration does not say."""


def kind_of(path: str) -> str | None:
    """The kind of a file by its name, compressed or not; None where the name does not say."""
    return SUFFIXES.get(PurePath(path.removesuffix(".gz")).suffix.lower())


def name_kind(data: dict[str, Any]) -> None:
    """Add the kind that the name of the file says, where none is given."""
    path = data.get("path")
    if "kind" not in data and isinstance(path, str) and (kind := kind_of(path)) is not None:
        data["kind"] = kind


@dataclass(frozen=True)
class DataConfig:
    """A source of records by name, and the public facts that the data must not be asked for.

    With `user` all records of one user are one unit of privacy: sampled, clipped and protected
    together.
    """

    kind: str = setting("embedded", f"Source of records: {', '.join(KINDS)}.")
    dir: str | None = setting(
        None, "Folder that holds mnist/, adult/, ...", "the environment's DPFY_DATA"
    )
    path: str | None = setting(
        None, "File to train on (idx, npz, csv, parquet, text), or folder (images)."
    )
    labels_path: str | None = setting(None, "File of its labels (idx).")
    test_path: str | None = setting(
        None, "File of held-out records.", "a share of `path`, see test_fraction"
    )
    test_labels_path: str | None = setting(None, "File of their labels (idx).")
    schema: str | None = setting(
        None,
        "TOML file that says what each column may hold (csv, parquet), or a packaged one: adult.",
    )
    classes: int | None = setting(None, "Number of classes (idx, npz).")
    names: tuple[str, ...] | None = setting(
        None, "Names of the sub-folders, one a class, in the order of the classes (images)."
    )
    size: int | None = setting(None, "Height and width that images are resized to (images).")
    range: tuple[float, float] | None = setting(
        None, "[low, high] that NPZ features are clamped to and scaled from."
    )
    test_fraction: float = setting(
        0.2, "Share held out by a fixed public permutation when there is no test file."
    )
    length: int = setting(128, "Characters in a text record.")
    test: str | None = setting(
        None,
        "What held-out records are: public (figures published as measured), charged (private: noisy "
        "counts, paid for) or withheld.",
        "public for public data sets, withheld for a file of your own",
    )
    user: str | None = setting(
        None,
        "Column (npz: array; mnist: writer) that says whose a record is: users are then the unit "
        "of privacy. Several, with commas between them, where a record belongs to several users.",
    )
    most_records: int | None = setting(
        None, "Most records of one user that are used: in a batch, or with draw = record at all."
    )
    pick: str = setting(
        RANDOM,
        "Which, of a user who has more: random (others in every batch) or first (always the "
        "first).",
    )
    user_loss: str = setting(SUM, "Loss of a user: sum or mean over the records used.")
    draw: str = setting(
        USER,
        "What is drawn and clipped: user (all of a user's as one), or record (one by one, charged "
        "for most_records of them together).",
    )
    time: str | None = setting(
        None,
        "Column (npz: array) that says when a record was made: seconds since 1970, or an ISO date.",
    )
    window: str | None = setting(
        None,
        f"Protects what a user contributed within one {', '.join(WINDOWS)}.",
        "all that a user did",
    )

    @property
    def unit(self) -> Unit:
        """Whose data is protected as a whole."""
        if "length" in FIELDS_OF_KIND[self.kind]:
            return Unit(TOKEN_WINDOW, tokens=self.length + 1)
        if self.most_records is None:
            return EXAMPLE
        return user_unit(self.most_records, self.window, self.shared)

    @property
    def shared(self) -> bool:
        """Whether a record may have several owners."""
        return len(self.owners) > 1

    @property
    def owners(self) -> tuple[str, ...]:
        """The columns that say whose a record is."""
        return () if self.user is None else owner_columns("data.user", self.user)

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
        if self.size is not None:
            check.integer("data.size", self.size, least=4, most=1024)
        if self.names is not None:
            self._check_names()
        if self.range is not None:
            object.__setattr__(self, "range", interval("data.range", self.range))
        if self.test is not None:
            check.one_of("data.test", self.test, TESTS)
        if self.most_records is not None:
            check.integer("data.most_records", self.most_records, most=MOST_RECORDS)
        if (self.user is None) != (self.most_records is None):
            missing = "most_records" if self.most_records is None else "user"
            raise InvalidInput(
                f"data.{missing}",
                None,
                "must be given with the other of data.user (--person) and data.most_records "
                "(--at-most)",
            )
        self._check_users()
        self._check_fields_fit_the_kind()

    def _check_names(self) -> None:
        given = self.names
        if (
            not isinstance(given, tuple | list)
            or len(given) < 2
            or not all(isinstance(name, str) and name for name in given)
            or len(set(given)) != len(given)
        ):
            raise InvalidInput("data.names", given, "must be a list of two or more different names")
        object.__setattr__(self, "names", tuple(given))

    def _check_users(self) -> None:
        check.one_of("data.pick", self.pick, PICKS)
        check.one_of("data.user_loss", self.user_loss, USER_LOSSES)
        check.one_of("data.draw", self.draw, DRAWS)
        if self.window is not None:
            check.one_of("data.window", self.window, WINDOWS)
        if (self.time is None) != (self.window is None):
            missing = "window" if self.window is None else "time"
            raise InvalidInput(
                f"data.{missing}", None, "must be given with the other of data.time and data.window"
            )
        if self.user is None:
            for name in OF_USERS[2:]:
                if getattr(self, name) != self.__dataclass_fields__[name].default:
                    raise InvalidInput(f"data.{name}", getattr(self, name), "goes with data.user")
        if self.shared:
            self._check_shared()
        if self.kind == "mnist" and self.user not in (None, "writer"):
            raise InvalidInput("data.user", self.user, "must be writer: whose hand an image is in")
        if self.kind == "mnist" and self.user is not None and self.test == "billed":
            raise InvalidInput(
                "data.test", self.test, "the writers of its test images are not read: say public"
            )

    def _check_shared(self) -> None:
        object.__setattr__(self, "draw", RECORD)
        if self.kind not in ("csv", "parquet"):
            rule = "must be one array for this kind: several owners of a record are for tables"
            raise InvalidInput("data.user", self.user, rule)
        if self.window is not None:
            raise InvalidInput("data.window", self.window, "is for records with one owner")
        if self.test == "billed":
            rule = "must be public or withheld where a record has several owners"
            raise InvalidInput("data.test", self.test, rule)

    def _check_strings(self) -> None:
        for name in ("dir", "path", "labels_path", "test_path", "test_labels_path", "schema"):
            if getattr(self, name) is not None:
                text(f"data.{name}", getattr(self, name), "must be a path as text")
        for name in ("user", "time"):
            if getattr(self, name) is not None:
                text(f"data.{name}", getattr(self, name), "must be the name of a column")

    def _check_fields_fit_the_kind(self) -> None:
        rule = (
            f"must be given for kind {self.kind!r}: it is never guessed from the data"
            + HINTS.get(self.kind, "")
        )
        missing = [name for name in REQUIRED.get(self.kind, ()) if getattr(self, name) is None]
        errors.raise_all(InvalidInput(f"data.{name}", None, rule) for name in missing)
        for name, field in self.__dataclass_fields__.items():
            if (
                name not in (*OF_EVERY_KIND, *FIELDS_OF_KIND[self.kind])
                and getattr(self, name) != field.default
            ):
                allowed = ", ".join(FIELDS_OF_KIND[self.kind]) or "no other field"
                rule = f"kind {self.kind!r} does not read it (it reads: {allowed})"
                raise InvalidInput(f"data.{name}", getattr(self, name), rule)
        if self.kind == "idx" and (self.test_path is None) != (self.test_labels_path is None):
            raise InvalidInput(
                "data.test_labels_path",
                self.test_labels_path,
                "must be given together with test_path",
            )
