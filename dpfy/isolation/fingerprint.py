"""The fingerprint of a recorded step: which operations, on what, with which constants - whatever
the batch holds and however long it is.

A resumed run adds the noise that its first steps had before. That is safe only if it computes what
was computed then, so the fingerprint of the run is kept, and the first step after a resume is
compared with it before anything is released.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from dpfy.isolation.operations import BATCH, Operation, Ref
from dpfy.isolation.program import Program

FORMAT = "steps-1"
MOST_HASHED = 1 << 24
"""Bytes of a constant tensor up to which its content counts; of longer ones the length does."""

ANY = "*"
"""A constant that was seen to change from step to step: a schedule, an annealed weight."""

FIELD = "field "
"""How the names of the batch's fields begin."""

SCALES = {"mul", "div", "mul_", "div_", "add", "sub", "add_", "sub_", "pow", "true_divide"} | {
    "rsub",
    "rpow",
    "lerp",
    "clamp",
}
POINTWISE = {"neg", "exp", "log", "abs", "square", "sqrt", "tanh", "sigmoid", "relu", "reciprocal"}
"""Arithmetic, with and without constants of its own."""


def fingerprint(
    program: Program,
    end: int,
    losses: Ref,
    names: Mapping[int, str],
    rows: int,
    lengths: list[list[int]] | None = None,
) -> str:
    """Of the first `end` operations of `program`, which made `losses` from `rows` examples; `names`
    knows parameters and fields.

    Only operations that the losses come from count, each with the constants of all its uses.
    `lengths` are the sides of each field of the batch: where padding gives a step others, sizes may
    differ too. Packed sequences are gone through step by step, as far as the longest goes: what is
    done then varies from the first step on.
    """
    used = _needed(program, end, losses, names)
    marks = {index: _outside(program, index, names) for index in program.outside}
    nodes: dict[str, list[list[Any]]] = {}
    for operation in used:
        constants, sizes = _plain(operation)
        inputs = sorted({marks.get(r.storage, "?") for r in operation.inputs}) if _listed(operation) else [
            marks.get(r.storage, "?") for r in operation.inputs
        ]  # fmt: skip
        kinds = sorted({f"{r.dtype} {len(r.shape)}" for r in operation.outputs})
        mark = _hash([str(operation.call), inputs, kinds])
        for ref in (*operation.outputs, *operation.written):
            if not operation.view and not _fixed(ref, names):
                marks[ref.storage] = mark
        entry = [str(operation.call), constants, sizes]
        if entry not in (found := nodes.setdefault(mark, [])):
            found.append(entry)
    packed = [size for call in program.packed for size in (call.steps, call.longest)]
    content = {
        "format": FORMAT,
        "rows": rows,
        "nodes": nodes,
        "varies": bool(packed),
        "lengths": lengths,
        "packed": packed,
    }
    return json.dumps(content, separators=(",", ":"))


def difference(old: str, new: str) -> str | None:
    """What the step of `new` does that those of `old` did not, in words; None if it is the same
    computation.
    """
    before, now = json.loads(old), json.loads(new)
    if before["varies"]:
        known = {entry[0] for uses in before["nodes"].values() for entry in uses}
        strange = sorted({entry[0] for uses in now["nodes"].values() for entry in uses} - known)
        return f"the operation {strange[0]}, which no earlier step had" if strange else None
    for mark in before["nodes"].keys() ^ now["nodes"].keys():
        side, words = (before, "is missing") if mark in before["nodes"] else (now, "is new")
        return f"the operation {side['nodes'][mark][0][0]} {words}"
    for mark, uses in before["nodes"].items():
        if not _alike(uses, now["nodes"][mark], before, now):
            return f"other constants in the operation {uses[0][0]}"
    return None


def joined(old: str, new: str) -> str:
    """The fingerprint of a run in which both steps occurred: what differs between them may differ
    again.
    """
    before, now = json.loads(old), json.loads(new)
    if before["varies"] or before["nodes"].keys() != now["nodes"].keys():
        before["varies"] = True
        for mark, uses in now["nodes"].items():
            before["nodes"].setdefault(mark, uses)
        return json.dumps(before, separators=(",", ":"))
    for mark, uses in before["nodes"].items():
        if not _alike(uses, now["nodes"][mark], before, now):
            before["nodes"][mark] = [[uses[0][0], ANY, ANY]]
    return json.dumps(before, separators=(",", ":"))


def comparable(old: str, new: str) -> bool:
    """Whether two steps do the same operations, so that their constants can be compared."""
    calls = [
        sorted(_kind(uses[0][0]) for uses in json.loads(text)["nodes"].values())
        for text in (old, new)
    ]
    return calls[0] == calls[1]


def changed_constants(old: str, new: str) -> str | None:
    """An operation whose real constants differ between two comparable steps, or "a tensor" where
    its contents differ; else None.
    """
    before, now = json.loads(old)["nodes"], json.loads(new)["nodes"]
    for mark, uses in before.items():
        theirs = now.get(mark, [])
        if (
            len(uses) == len(theirs) == 1
            and ANY not in (uses[0][1], theirs[0][1])
            and (
                uses[0][1] != theirs[0][1]
                # whole numbers are factors there, and no sizes
                or (_kind(uses[0][0]) in SCALES and uses[0][2] != theirs[0][2])
            )
        ):
            return _kind(uses[0][0])
    return "a tensor from outside" if before.keys() != now.keys() else None


def new_constant(old: str, new: str) -> str | None:
    """An arithmetic operation with a number of Python that one of two steps has and the other does
    not, where they differ in arithmetic alone; else None.
    """
    kinds = [
        Counter(_kind(uses[0][0]) for uses in json.loads(text)["nodes"].values())
        for text in (old, new)
    ]
    fewer, more = sorted(kinds, key=Counter.total)
    if not fewer <= more or not (more - fewer).keys() <= SCALES | POINTWISE:
        return None
    content = json.loads(new if more is kinds[1] else old)
    scaling = {kind for kind, _ in _scaling(content)}
    return min((kind for kind in more - fewer if kind in scaling), default=None)


def scaled_by_size(old: str, new: str) -> str | None:
    """The arithmetic operation whose constant is proportional to the number of examples, or to its
    inverse, in both steps.
    """
    before, now = json.loads(old), json.loads(new)
    m, n = before["rows"], now["rows"]
    for mark, uses in before["nodes"].items():
        others = now["nodes"].get(mark, [])
        if m == n or len(uses) != 1 or len(others) != 1 or _kind(uses[0][0]) not in SCALES:
            continue
        for a, b in zip(_numbers(uses[0][1:]), _numbers(others[0][1:]), strict=False):
            if a and b and a != b and (_near(a * n, b * m) or _near(a * m, b * n)):
                return _kind(uses[0][0])
    return None


def scaled_by_length(old: str, new: str) -> str | None:
    """The arithmetic operation whose constant, in both steps, is the length of all packed sequences
    or of the longest, or its inverse.

    A constant that both steps have is one.
    """
    before, now = json.loads(old), json.loads(new)
    pairs = zip(before.get("packed", ()), now.get("packed", ()), strict=False)
    first, second = _scaling(before), _scaling(now)
    for place in (place for place, (a, b) in enumerate(pairs) if a != b):
        if found := _by_length(before, first - second, place) & _by_length(
            now, second - first, place
        ):
            return min(found)
    return None


def _scaling(content: Mapping[str, Any]) -> set[tuple[str, float]]:
    """The arithmetic operations, by kind, and their constants."""
    uses = [use for uses in content["nodes"].values() for use in uses if _kind(use[0]) in SCALES]
    return {(_kind(use[0]), number) for use in uses for number in _numbers(use[1:]) if number}


def _by_length(content: Mapping[str, Any], scaling: set[tuple[str, float]], place: int) -> set[str]:
    """The kinds among `scaling` that scale by a length of packed sequences, for the whole batch or
    for an example of it.
    """
    length, rows = content["packed"][place], content["rows"]
    return {
        kind
        for kind, a in scaling
        for b in (length, 1 / length, length / rows, rows / length)
        if _near(a, b)
    }


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * abs(a)


def _kind(call: str) -> str:
    return call.removeprefix("aten.").partition(".")[0]


def _numbers(value: Any) -> list[float]:
    if isinstance(value, list):
        return [x for v in value for x in _numbers(v)]
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def _alike(
    uses: list[list[Any]],
    others: list[list[Any]],
    before: Mapping[str, Any],
    new: Mapping[str, Any],
) -> bool:
    """The same constants; sizes may follow the number of examples. A loop over the examples has
    uses by their number.

    Between two steps whose fields were padded to other lengths, sizes and numbers of uses may
    differ.
    """
    rows, now, held = (
        before["rows"],
        new["rows"],
        before.get("lengths"),
    )  # runs of before lengths were kept have none
    if held is not None and new["lengths"] is not None and held != new["lengths"]:
        return ANY in (uses[0][1], others[0][1]) or [use[1] for use in uses[:1]] == [
            use[1] for use in others[:1]
        ]
    if ANY in uses[0][1:] or ANY in others[0][1:]:
        return True
    if len(uses) != len(others):
        return rows != now and len(uses) > 1 and len(others) > 1
    for (_, constants, sizes), (_, theirs, their_sizes) in zip(uses, others, strict=True):
        if constants != theirs or len(sizes) != len(their_sizes):
            return False
        for a, b in zip(sizes, their_sizes, strict=True):
            if not (a == b or (rows != now and (a * now == b * rows or a - rows == b - now))):
                return len(uses) > 1 and rows != now
    return True


def _fixed(ref: Ref, names: Mapping[int, str]) -> bool:
    """Whether it is a parameter or buffer: an evaluation may put averaged weights in and take them
    out again.
    """
    return not names.get(ref.storage, FIELD).startswith(FIELD)


def _needed(program: Program, end: int, losses: Ref, names: Mapping[int, str]) -> list[Operation]:
    """The operations, in order, that `losses` come from."""
    wanted, used = {losses.storage}, []
    for operation in reversed(program.operations[:end]):
        made = [
            r
            for r in (*operation.outputs, *operation.written)
            if operation.view or not _fixed(r, names)
        ]
        if any(r.storage in wanted for r in made):
            wanted.update(r.storage for r in operation.inputs)
            used.append(operation)
    return used[::-1]


def _outside(program: Program, index: int, names: Mapping[int, str]) -> str:
    """A name for a storage from outside: that of the parameter or field, or the hash of its
    content.
    """
    if index in names:
        return names[index]
    storage = program.initial.get(index, program.outside[index])
    if program.origin.get(index, 0) & ~BATCH or storage.nbytes() > MOST_HASHED:
        return f"constant {storage.nbytes()}"
    content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu()  # type: ignore[arg-type]
    return "constant " + hashlib.blake2b(content.numpy().tobytes(), digest_size=16).hexdigest()


def _plain(operation: Operation) -> tuple[list[Any], list[int]]:
    """The arguments that are no tensors: constants, and whole numbers that may be sizes."""
    constants: list[Any] = []
    sizes: list[int] = []

    def sort(value: Any) -> None:
        if isinstance(value, Ref):
            return
        if isinstance(value, bool) or value is None:
            constants.append(value)
        elif isinstance(value, int):
            sizes.append(value)
        elif isinstance(value, float):
            constants.append(value)
        elif isinstance(value, list | tuple):
            for v in value:
                sort(v)
        elif isinstance(value, dict):
            for k in sorted(value):
                sort(value[k])
        else:
            constants.append("generator" if isinstance(value, torch.Generator) else str(value))

    sort(operation.arguments)
    return constants, sizes


def _listed(operation: Operation) -> bool:
    """Whether a list of tensors is among the arguments: of a loop over the examples, which has no
    length of its own.
    """
    return any(
        isinstance(a, list | tuple) and any(isinstance(r, Ref) for r in a)
        for a in operation.arguments[0]
    )


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
