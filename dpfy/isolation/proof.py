"""A proof that a recorded step keeps its examples apart: every operation is read once, and none
brings two examples together, whatever the records and the parameters hold.

The elements of a storage belong to examples in turns: element `e` to example `e // block % rows`,
with one `block` for each storage. From that follows to which dimension of a tensor the examples lie
along, through views, transposed and folded dimensions. A rule for each kind of operation says along
which dimensions it works. What has no rule may mix, and a step whose losses need it has no proof:
it is run again with other records (comparison.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dpfy.isolation.operations import BATCH, Operation, Ref
from dpfy.isolation.program import Program

Place = tuple[int, int]
"""Where examples lie in a tensor: along which dimension, and how many neighbours there belong to
the same one: position `i` is of example `i // neighbours % rows`.
"""

MIXED = -1
"""In the place of a block: elements may belong to several examples."""

OF_ALL: Place = (-1, -1)
"""The place of what is a sum over the examples."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


POINTWISE = _names(
    "abs add addcdiv addcmul atan bernoulli bitwise_and bitwise_not bitwise_or ceil "
    "celu clamp clamp_max clamp_min clone copy cos div elu elu_backward eq erf exp exp2 "
    "expm1 fill floor floor_divide fmod ge gelu gelu_backward gt hardsigmoid "
    "hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward isfinite isnan "
    "le leaky_relu leaky_relu_backward lerp lgamma log log10 log1p log2 "
    "logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish "
    "mish_backward mul nan_to_num native_dropout native_dropout_backward ne neg normal pow "
    "reciprocal relu remainder round rsqrt rsub sigmoid sigmoid_backward sign silu silu_backward "
    "sin softplus softplus_backward sqrt sub tan tanh tanh_backward threshold "
    "threshold_backward true_divide uniform where xlogy zero _to_copy"
)
"""Operations that make each element from those at the same position."""

WITHOUT_CONTENT = _names(
    "empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_zeros new_ones "
    "new_full new_empty_strided"
)
"""Operations that take a tensor for its shape alone."""

ALONG = _names(
    "_log_softmax _log_softmax_backward_data _safe_softmax _softmax _softmax_backward_data cumprod "
    "cumsum flip gather glu glu_backward index_select scatter scatter_add "
    "sort topk"
)
"""Operations that work along the dimensions `dim` (`dims`) and keep them."""

OVER = _names(
    "all.dim amax.default amin.default any.dim argmax.default argmin.default "
    "linalg_vector_norm.default logsumexp.default max.dim mean.dim min.dim prod.dim_int "
    "std.correction sum.dim_IntList var.correction var_mean.correction"
)
"""Operations that reduce the dimensions `dim`."""

SPATIAL = _names(
    "avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward "
    "max_pool2d_with_indices max_pool2d_with_indices_backward tril triu upsample_bilinear2d "
    "upsample_nearest2d"
)
"""Operations that work along the last two dimensions."""

LOSSES = _names(
    "binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits "
    "huber_loss huber_loss_backward mse_loss mse_loss_backward smooth_l1_loss "
    "smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward"
)
"""Pointwise losses, where they are not reduced."""

ATTENTION = _names(
    "_scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward "
    "_scaled_dot_product_efficient_attention "
    "_scaled_dot_product_efficient_attention_backward"
)
"""Kernels for attention: their first dimension is of independent sequences."""


class _Unproven(Exception):
    """An operation may bring examples together."""


def works_apart(program: Program, needed: Sequence[Ref], fields: Sequence[Ref], rows: int) -> bool:
    """Whether every row of `needed` comes from the same row of the `fields`, and from what does not
    depend on the batch.

    Guarantees: where it says so, running the program again with other records in some rows, and
    with any parameters and constants, changes nothing in the others. Operations that Python or a
    shape learned values from leave nothing proven.
    """
    if rows < 2 or program.problem is not None or program.packed or program.padded:
        return False
    proof = _Proof(program, rows)
    try:
        for ref in fields:
            if ref.shape[0] != rows:
                return False
            proof.give(ref, (0, 1))
        proof.follow()
        return all(proof.place(ref) in (None, (0, 1)) for ref in needed)
    except _Unproven:
        return False


class _Proof:
    """The block of each storage so far: 0 where it does not depend on the batch."""

    def __init__(self, program: Program, rows: int) -> None:
        self._program, self._rows = program, rows
        self._blocks = {
            index: MIXED for index in program.outside if program.origin.get(index, 0) & ~BATCH
        }

    def follow(self) -> None:
        """Go through the operations in order."""
        for operation in self._program.operations:
            if operation.view or not any(self._blocks.get(r.storage) for r in operation.inputs):
                continue
            if operation.read or operation.shaped:
                raise _Unproven
            made = [*operation.outputs, *operation.written]
            try:
                places = _rule_of(operation.call)(self, operation)
                for k, ref in enumerate(made):
                    self.give(ref, places[min(k, len(places) - 1)])
            except _Unproven:
                for ref in made:
                    self._blocks[ref.storage] = MIXED

    def give(self, ref: Ref, place: Place | None) -> None:
        """The examples of what lies at `ref` are at `place`."""
        if place is None:
            return
        if place == OF_ALL:
            self._blocks[ref.storage] = MIXED
            return
        before = self._blocks.get(ref.storage)
        dim, neighbours = place
        block = ref.stride[dim] * neighbours * ref.dtype.itemsize
        if before and before != block:
            raise _Unproven
        self._blocks[ref.storage] = block
        if block <= 0 or self.place(ref) != place:
            raise _Unproven

    def place(self, ref: Ref) -> Place | None:
        """Where the examples lie in the tensor at `ref`; None if it does not depend on the
        batch.
        """
        block = self._blocks.get(ref.storage, 0)
        if not block:
            return None
        block, rest = divmod(block, ref.dtype.itemsize)
        if block <= 0 or rest:
            raise _Unproven
        found, within = None, ref.offset % block
        for dim, (size, stride) in enumerate(zip(ref.shape, ref.stride, strict=True)):
            if size == 1 or stride % (block * self._rows) == 0:
                continue
            if (size - 1) * stride >= block:
                neighbours, rest = divmod(block, stride)
                if found or rest or size % (neighbours * self._rows):
                    raise _Unproven
                found, size = (dim, neighbours), neighbours
            within += (size - 1) * stride
        if found is None or within >= block or ref.offset // block % self._rows:
            raise _Unproven
        return found

    def common(self, refs: Sequence[Any], dims: int) -> Place | None:
        """Where the examples lie in what is made of `refs` position by position, with so many
        dimensions.
        """
        found = None
        for ref in refs:
            if isinstance(ref, Ref) and (place := self.place(ref)) is not None:
                place = place[0] + dims - len(ref.shape), place[1]
                if found not in (None, place):
                    raise _Unproven
                found = place
        return found


def _value(operation: Operation, name: str) -> Any:
    """An argument by its name."""
    args, kwargs = operation.arguments
    for place, argument in enumerate(operation.call._schema.arguments):  # type: ignore[attr-defined]
        if argument.name == name:
            if name in kwargs:
                return kwargs[name]
            return args[place] if place < len(args) else argument.default_value
    raise _Unproven


def _dims(operation: Operation, ndim: int, name: str = "dim") -> set[int]:
    """The dimensions that an operation works along; it must name some."""
    given = _value(operation, name)
    found = {d % ndim for d in ([given] if isinstance(given, int) else given or ())}
    if not found:
        raise _Unproven
    return found


Rule = Callable[[_Proof, Operation], Sequence[Place | None]]
"""From an operation, where the examples lie in what it gives; the last of them is also that of all
further tensors, and of what it writes. Raises where it may bring examples together.
"""


def _unknown(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    raise _Unproven


def _without_content(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    return (None,)


def _pointwise(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    first = (*operation.written, *operation.outputs)[0]
    return (proof.common(operation.inputs, len(first.shape)),)


def _loss(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    if _value(operation, "reduction") != 0:
        raise _Unproven
    return _pointwise(proof, operation)


def _along(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    first = operation.inputs[0]
    alike = {len(r.shape) for r in operation.inputs} == {len(first.shape)}
    fixed = operation.name == "index_select" and proof.place(operation.inputs[1]) is None
    if not (alike or fixed):
        raise _Unproven
    place = proof.common(operation.inputs, len(first.shape))
    name = "dims" if operation.name == "flip" else "dim"
    if place is None or place[0] in _dims(operation, len(first.shape), name):
        raise _Unproven
    return (place,)


def _over(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    (ref,) = operation.inputs
    place, dims = proof.place(ref), _dims(operation, len(ref.shape))
    if place is None or place[0] in dims:
        raise _Unproven
    gone = 0 if _value(operation, "keepdim") else sum(d < place[0] for d in dims)
    return ((place[0] - gone, place[1]),)


def _spatial(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    ndim = len(operation.inputs[0].shape)
    place = proof.common(operation.inputs, ndim)
    if place is None or place[0] >= ndim - 2 or {len(r.shape) for r in operation.inputs} != {ndim}:
        raise _Unproven
    return (place,)


def _product(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    """Matrix products, and such products added to something."""
    *added, a, b = operation.inputs
    first, second, batched = proof.place(a), proof.place(b), len(a.shape) - 2
    last = batched + 1
    if second is None:
        allowed = first is None or first[0] != last
    elif first is None:
        allowed = second[0] != last - 1
    else:
        allowed = first == second and batched == 1 and first[0] == 0
    place = first or second
    if not allowed or proof.common(added, last + 1) not in (None, place):
        raise _Unproven
    return (place or proof.common(added, last + 1),)


def _joined(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    """cat and stack."""
    ndim, new = len(operation.inputs[0].shape), operation.name == "stack"
    if any(len(r.shape) != ndim for r in operation.inputs):
        raise _Unproven
    place, dim = proof.common(operation.inputs, ndim), _value(operation, "dim") % (ndim + new)
    if place is None or (dim == place[0] and not new):
        raise _Unproven
    return ((place[0] + (new and dim <= place[0]), place[1]),)


def _put_back(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    """The backward passes of slices and of picking a position."""
    ref, out = operation.inputs[0], operation.outputs[0]
    place, dim = proof.place(ref), _value(operation, "dim") % len(out.shape)
    gone = len(out.shape) - len(ref.shape)
    if place is None or (dim == place[0] and not gone):
        raise _Unproven
    return ((place[0] + (gone and dim <= place[0]), place[1]),)


def _padded(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    (ref,) = operation.inputs
    place = proof.place(ref)
    if place is None or place[0] >= len(ref.shape) - len(_value(operation, "pad")) // 2:
        raise _Unproven
    return (place,)


def _first_dimension(proof: _Proof, tensors: Sequence[Any]) -> Place:
    """All those of `tensors` that depend on the batch have their examples along the first
    dimension.
    """
    places = {proof.place(r) for r in tensors if isinstance(r, Ref)} - {None}
    place = places.pop() if len(places) == 1 else None
    if place is None or place[0] != 0:
        raise _Unproven
    return place


def _fixed(proof: _Proof, tensors: Sequence[Any]) -> None:
    """None of `tensors` depends on the batch."""
    if any(isinstance(r, Ref) and proof.place(r) is not None for r in tensors):
        raise _Unproven


def _inputs_gradient(
    proof: _Proof, operation: Operation, rows: Sequence[str], shared: Sequence[str]
) -> Sequence[Place | None]:
    """A backward pass that gives the gradient of its input, and of the parameters after it."""
    _fixed(proof, [_value(operation, name) for name in shared])
    place = _first_dimension(proof, [_value(operation, name) for name in rows])
    mask = _value(operation, "output_mask")
    return (place, *[OF_ALL] * (len(mask) - 1)) if mask[0] else (OF_ALL,)


def _by_first_dimension(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    _fixed(proof, [_value(operation, "weight"), _value(operation, "bias")])
    return (_first_dimension(proof, [_value(operation, "input")]),)


def _convolution_backward(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    return _inputs_gradient(proof, operation, ("grad_output", "input"), ("weight",))


def _group_norm_backward(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    rows = ("grad_out", "input", "mean", "rstd")
    return _inputs_gradient(proof, operation, rows, ("weight",))


def _layer_norm(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    ref = _value(operation, "input")
    _fixed(proof, [_value(operation, "weight"), _value(operation, "bias")])
    place = proof.place(ref)
    if place is None or place[0] >= len(ref.shape) - len(_value(operation, "normalized_shape")):
        raise _Unproven
    return (place,)


def _layer_norm_backward(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    refs = [_value(operation, name) for name in ("grad_out", "input", "mean", "rstd")]
    _fixed(proof, [_value(operation, "weight"), _value(operation, "bias")])
    ndim, mask = len(refs[1].shape), _value(operation, "output_mask")
    place = proof.common(refs, ndim)
    if place is None or place[0] >= ndim - len(_value(operation, "normalized_shape")):
        raise _Unproven
    return (place, OF_ALL, OF_ALL) if mask[0] else (OF_ALL,)


def _nll(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    """The log likelihood that classes are chosen from, not reduced, and its backward pass."""
    _fixed(proof, [_value(operation, "weight")])
    names = ["self", "target"]
    names += ["grad_output"] if operation.name.endswith("backward") else []
    if _value(operation, "reduction") != 0 or len(_value(operation, "self").shape) not in (2, 4):
        raise _Unproven
    place = _first_dimension(proof, [_value(operation, name) for name in names])
    return place, OF_ALL


def _embedding(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    weight, indices = operation.inputs
    _fixed(proof, [weight])
    return (proof.place(indices),)


def _attention(proof: _Proof, operation: Operation) -> Sequence[Place | None]:
    backward = operation.name.endswith("backward")
    sums = _value(operation, "logsumexp") if backward else None
    rows = [r for r in operation.inputs if proof.place(r) is not None]
    # a mask of fewer dimensions is one for all sequences, and the gradient of a mask may be a sum
    if any(len(r.shape) != 4 and r != sums for r in rows) or (
        backward and len(operation.outputs) > 3
    ):
        raise _Unproven
    place = _first_dimension(proof, rows)
    return [place if len(r.shape) > 1 else None for r in operation.outputs]


RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(WITHOUT_CONTENT, _without_content),
    **dict.fromkeys(ALONG, _along),
    **dict.fromkeys(OVER, _over),
    **dict.fromkeys(SPATIAL, _spatial),
    **dict.fromkeys(LOSSES, _loss),
    **dict.fromkeys(ATTENTION, _attention),
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("slice_backward", "select_backward"), _put_back),
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward"), _nll),
    **dict.fromkeys(("nll_loss2d_forward", "nll_loss2d_backward"), _nll),
    "constant_pad_nd": _padded,
    "convolution": _by_first_dimension,
    "convolution_backward": _convolution_backward,
    "native_group_norm": _by_first_dimension,
    "native_group_norm_backward": _group_norm_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "embedding": _embedding,
}
"""By torch's name, with the overload where others of the name do something else. What writes into
its input has the name of what does not, with an underscore.
"""

_rules: dict[int, tuple[Any, Rule]] = {}
"""By the identity of the operator, which is held: it computes its hash in Python."""


def _rule_of(call: Callable[..., Any]) -> Rule:
    found = _rules.get(id(call))
    if found is None:
        full = str(call).removeprefix("aten.")
        name = full.partition(".")[0]
        base = name.removesuffix("_") if not name.startswith("__") else name
        rules = [RULES[n] for n in (full, name, base) if n in RULES]
        found = _rules[id(call)] = call, (rules or [_unknown])[0]
    return found[1]
