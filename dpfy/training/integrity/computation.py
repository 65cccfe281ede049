"""What a model and its losses compute, as a fingerprint of their code: a resumed run must not
compute something else.

The code is read as Python runs it (instructions, constants, names), with the functions, methods and
plain global values that it names, so that neither comments nor places of files matter. Code of
torch and dpfy is not followed: their versions are kept elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
KNOWN = ("torch", "dpfy", "builtins")
PLAIN = (bool, int, float, complex, str, bytes, type(None))
FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType)
DEEPEST = 12


def of_model(model: nn.Module) -> str:
    """Every module of `model`, as text: name, class, settings, and the code of its forward pass.
    Weights are not in it.
    """
    lines, codes = [], dict[type, str]()
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in codes:
            codes[kind] = "" if _known(kind) else of_function(kind.forward, kind)
        lines.append(f"{name}: {kind.__qualname__} {_settings(module)} {codes[kind]}")
    return "\n".join(lines)


def of_function(function: Any, owner: type | None = None) -> str:
    """The code of `function` and of what it calls, as text; methods are looked up in `owner`."""
    return ";".join(_walk(function, owner, set(), 0))


def _settings(module: nn.Module) -> str:
    """Numbers, words and functions that a module holds, and what it says about itself; not its
    mode, nor what is its own affair.
    """
    own = {
        k: v for k, v in sorted(vars(module).items()) if not k.startswith("_") and k != "training"
    }
    described = [f"{k}={_value(v)}" for k, v in own.items() if isinstance(v, (*PLAIN, tuple))]
    described += [f"{k}={of_function(v)}" for k, v in own.items() if isinstance(v, FUNCTIONS)]
    shapes = [
        f"{k}{tuple(p.shape)}"
        for k, p in (*module._parameters.items(), *module._buffers.items())
        if p is not None
    ]
    said = "" if any(True for _ in module.children()) else module.extra_repr()
    return ADDRESS.sub("", f"{said} {' '.join(described)} {' '.join(shapes)}")


def _known(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in KNOWN


def _value(value: Any) -> str:
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{','.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{_value(k)}:{_value(v)}' for k, v in value.items())}}}"
    if isinstance(value, frozenset | set):
        return f"{{{','.join(sorted(map(_value, value)))}}}"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _walk(thing: Any, owner: type | None, seen: set[int], depth: int) -> Iterator[str]:
    """The code of `thing` and of all it names, each once."""
    while hasattr(thing, "__wrapped__") or isinstance(thing, partial):
        yield _value(thing)
        if isinstance(thing, partial):
            yield f"{_value(thing.args)}{_value(thing.keywords)}"
        thing = thing.func if isinstance(thing, partial) else thing.__wrapped__
    if not isinstance(thing, (*FUNCTIONS, type)) and callable(thing) and not _known(type(thing)):
        yield f"{_value(thing)}{_value(getattr(thing, '__dict__', {}))}"
        owner, thing = type(thing), type(thing).__call__
    function = thing.__func__ if isinstance(thing, MethodType) else thing
    owner = type(thing.__self__) if isinstance(thing, MethodType) else owner
    if not isinstance(function, FunctionType) or (depth and _known(function)):
        yield _value(thing)
        return
    if id(function) in seen or depth > DEEPEST:
        return
    seen.add(id(function))
    yield f"{_value(function.__defaults__)}{_value(tuple(sorted((function.__kwdefaults__ or {}).items())))}"
    names: list[str] = []
    yield from _code(function.__code__, names)
    held = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    found = [getattr(owner, n, None) for n in names if owner is not None] + [
        function.__globals__.get(n) for n in names
    ]
    for part in (*held, *found, *(function.__defaults__ or ())):
        if isinstance(part, FUNCTIONS):
            yield from _walk(part, owner, seen, depth + 1)
        elif isinstance(part, PLAIN) and part is not None:
            yield _value(part)


def _code(code: CodeType, names: list[str]) -> Iterator[str]:
    """Instructions, constants and names of `code` and of the functions inside it; `names` grows."""
    names += code.co_names
    yield code.co_code.hex()
    yield ",".join((*code.co_names, *code.co_varnames, *code.co_freevars))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant, names)
        else:
            yield _value(constant)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
