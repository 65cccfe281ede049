"""Which tree nodes a unit touches, and how often: the exact sensitivity of tree noise.

A tree is (first step, leaves, leaves charged); a node is charged when it is complete within the
charged leaves.

Binary tree aggregation: noise on the sums over dyadic blocks of steps, prefix sums read off the
blocks.

Kept for comparison and for the published study; every Toeplitz strategy here has less error. Each
block ("node") that is complete is charged, whether or not its noise is ever used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpfy.core import check
from dpfy.core import unit as patterns
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.noise import noise_buffers
from dpfy.noise.strategy import Draw, Grads, State

if TYPE_CHECKING:
    import numpy as np
if TYPE_CHECKING:
    from numpy.typing import NDArray

Trees = list[tuple[int, int, int]]
Table = dict[tuple[bool, bool], tuple[int, int]]


def fixed_order(trees: Trees, period: int, most: int, steps: int) -> int:
    """Participations at s, s + period, ...: the largest sum of squared counts over s."""
    firsts = np.array([first for first, _, _ in trees])
    billed = np.array([full for _, _, full in trees])
    best = 0
    for start in range(min(period, steps)):
        places = np.arange(start, steps, period)[:most]
        tree = np.searchsorted(firsts, places, side="right") - 1
        local = places - firsts[tree]
        total = 0
        for level in range(int(billed.max()).bit_length()):
            node = local >> level
            complete = (node + 1) << level <= billed[tree]
            _, counts = np.unique(
                np.stack([tree[complete], node[complete]]), axis=1, return_counts=True
            )
            total += int((counts**2).sum())
        best = max(best, total)
    return best


def reshuffled(trees: Trees, period: int, most: int, steps: int) -> int:
    """One participation in each of the first `most` epochs, anywhere in it: exact, by dynamic
    programming over the trees.

    A subtree meets its first and last epoch in part and every epoch between them whole. Whole
    epochs always count (more participations never lower the sum), so a subtree has four states:
    does the participation of its first and of its last epoch fall inside it?
    """
    end = min(steps, period * most)
    answers: Table = {}
    span: tuple[int, int] | None = None
    for first, leaves, full in trees:
        stop = min(first + leaves, end)
        for begin, size in _roots(first, full):
            if begin >= stop:
                break
            table = _subtree(begin, size, stop, period)
            epochs = (begin // period, (min(begin + size, stop) - 1) // period)
            if span is None:
                answers, span = table, epochs
            else:
                answers = _join(answers, span, table, epochs)
                span = (span[0], epochs[1])
    return max(total for _, total in answers.values())


def _roots(first: int, full: int) -> list[tuple[int, int]]:
    """The complete subtrees that make up `full` leaves, largest first."""
    roots, begin = [], first
    for level in reversed(range(full.bit_length())):
        if full >> level & 1:
            roots.append((begin, 1 << level))
            begin += 1 << level
    return roots


def _subtree(begin: int, size: int, stop: int, period: int) -> Table:
    """State -> (participations inside, best sum of squares). Leaves at or after `stop` hold no
    data.
    """
    if size == 1:
        return {(False, False): (0, 0), (True, True): (1, 1)}
    half = size // 2
    left = _subtree(begin, half, stop, period)
    left_span = (begin // period, (min(begin + half, stop) - 1) // period)
    if begin + half >= stop:
        joined = left
    else:
        right = _subtree(begin + half, half, stop, period)
        right_span = ((begin + half) // period, (min(begin + size, stop) - 1) // period)
        joined = _join(left, left_span, right, right_span)
    return {state: (count, total + count * count) for state, (count, total) in joined.items()}


def _join(
    left: Table,
    left_span: tuple[int, int],
    right: Table,
    right_span: tuple[int, int],
) -> Table:
    """Two neighbouring stretches of steps as one. The epoch they share has one participation, on
    one side at most.
    """
    shared = left_span[1] == right_span[0]
    best: Table = {}
    for (l_first, l_last), (l_count, l_total) in left.items():
        for (r_first, r_last), (r_count, r_total) in right.items():
            if shared and l_last and r_first:
                continue
            middle = l_last or r_first
            first = middle if shared and left_span[0] == left_span[1] else l_first
            last = middle if shared and right_span[0] == right_span[1] else r_last
            state, value = (first, last), (l_count + r_count, l_total + r_total)
            if state not in best or value > best[state]:
                best[state] = value
    return best


ESTIMATORS = ("completed", "honaker")


@dataclass(frozen=True)
class Tree:
    """Noise on binary tree nodes (Dwork et al. 2010, Chan et al. 2011, Kairouz et al. 2021).

    `estimator`: "completed" sums one noisy node for each bit of the step count, as in the study;
    "honaker" improves each node by those below it (Honaker 2015, online). `restart`: begin a new
    tree after this many steps (an epoch); 0 never does. `completion`: when a tree is given up at a
    restart, fill it with empty steps, so that its total is one node.

    Guarantees: the noise of step t is the change of the prefix-sum noise from t - 1 to t; node
    noises are drawn at addresses of their own, numbered by the order of completion.
    """

    estimator: str = "honaker"
    restart: int = 0
    completion: bool = False

    def __post_init__(self) -> None:
        check.one_of("tree.estimator", self.estimator, ESTIMATORS)
        check.integer("tree.restart", self.restart, least=0)
        if self.completion and not self.restart:
            raise InvalidInput("tree.completion", self.completion, "needs a restart")

    # --- the matrices, as oracles
    # -------------------------------------------------------------------------------------------

    def noise_matrix(self, steps: int) -> NDArray[np.float64]:
        """The noise of each step as a combination of node draws: rows are steps, columns are draw
        addresses.
        """
        import numpy as np

        prefix = self._prefix_matrix(steps)
        return np.diff(prefix, axis=0, prepend=0)

    def encoder(self, steps: int) -> NDArray[np.float64]:
        """Nodes by steps, zero and one: which complete node holds which step. Its row order is not
        the draw order.
        """
        import numpy as np

        rows = []
        for first, leaves, full in self._trees(steps):
            level = 0
            while 2**level <= full:
                for index in range(full // 2**level):
                    row = np.zeros(steps)
                    row[
                        first + index * 2**level : min(
                            first + (index + 1) * 2**level, first + leaves
                        )
                    ] = 1
                    if row.any():
                        rows.append(row)
                level += 1
        return np.array(rows)

    def variances(self, steps: int) -> NDArray[np.float64]:
        """Variance of the prefix-sum noise after each step."""
        import numpy as np

        weights = np.array([self._variance(level) for level in range(steps.bit_length() + 1)])
        t = np.arange(1, steps + 1)
        done, local = (
            (t - 1) // self.restart if self.restart else 0 * t,
            (t - 1) % self.restart + 1 if self.restart else t,
        )
        bits = local[:, None] >> np.arange(len(weights))[None, :] & 1
        return bits @ weights + done * self._finished()

    def buffers(self, steps: int) -> int:
        """At most one estimate for each bit of the step count."""
        return (min(self.restart or steps, steps) - 1).bit_length()

    # --- sensitivity
    # --------------------------------------------------------------------------------------------------------

    def sensitivity(self, participation: patterns.Participation, steps: int) -> float:
        """Exact over all complete nodes; participations at least a separation apart, and sampling,
        have no proof here.
        """
        from dpfy.noise.sensitivity import up

        return up(self.squared_sensitivity(participation, steps) ** 0.5)

    def squared_sensitivity(self, participation: patterns.Participation, steps: int) -> float:
        """The largest sum over nodes of (participations in the node)^2: a whole number, 225 for the
        study's 120 steps x 10 epochs.
        """

        trees = self._trees(steps)
        if isinstance(participation, patterns.SinglePass):
            return float(fixed_order(trees, steps, 1, steps))
        if isinstance(participation, patterns.FixedOrder):
            return float(
                fixed_order(trees, participation.steps_per_epoch, participation.epochs, steps)
            )
        if isinstance(participation, patterns.Reshuffled):
            return float(
                reshuffled(trees, participation.steps_per_epoch, participation.epochs, steps)
            )
        raise Unsupported(
            f"tree noise with {type(participation).__name__} participation",
            "use a single pass, a fixed order or reshuffled epochs",
        )

    # --- streaming
    # ----------------------------------------------------------------------------------------------------------

    def fresh(self, step: int) -> float:
        """1: a node's own draw; what an estimator makes of it and of those below keeps more than
        half of it.
        """
        return 1.0

    def init(self, like: Grads) -> State:
        """No node yet."""
        return {}

    def next(self, step: int, draw: Draw, state: State) -> tuple[Grads, State]:
        """New node estimates in, the estimates they replace out."""
        epoch, local = divmod(step, self.restart) if self.restart else (0, step)
        held = _live(state, local or (self.restart if epoch else 0), step)

        def matching(address: int) -> Grads:
            fresh = draw(address)
            _match(held, fresh, step)
            return fresh

        noise: Grads = {}
        if epoch and not local and self.completion:
            root, replaced = self._complete(epoch - 1, matching, held)
            noise = _minus(root, replaced)
        live = held if local else {}
        fresh, level = self._carry(epoch, local + 1, matching, live)
        merged = {at: kept for at, kept in live.items() if at < level}
        change = _minus(fresh, merged)
        noise = {name: y + noise[name] for name, y in change.items()} if noise else change
        kept = {at: value for at, value in live.items() if at > level} | {level: fresh}
        return noise, {f"{at}.{name}": t for at, value in kept.items() for name, t in value.items()}

    def nodes(self, step: int) -> dict[int, float]:
        """The noise of `step` of the estimator "completed": weights of node draws, by their
        addresses. No state is needed.
        """
        epoch, local = divmod(step, self.restart) if self.restart else (0, step)
        top = (local + 1 & -(local + 1)).bit_length() - 1
        found = {self._node(epoch, local + 1, top): 1.0}
        if epoch and not local and self.completion:
            full = self._full()
            found[self._node(epoch - 1, full, full.bit_length() - 1)] = 1.0
            replaced, count, tree = self.restart.bit_length(), self.restart, epoch - 1
        else:
            replaced, count, tree = top, local, epoch
        for level in range(replaced):
            if count >> level & 1:
                node = self._node(tree, count >> level << level, level)
                found[node] = found.get(node, 0.0) - 1.0  # a tree that is full has its root already
        return {at: weight for at, weight in found.items() if weight}

    def _node(self, epoch: int, count: int, level: int) -> int:
        """The address of the node of `level` that ends at leaf `count` of its tree."""
        return epoch * 2 * self._full() + 2 * (count - 1) - (count - 1).bit_count() + level

    def _carry(
        self, epoch: int, count: int, draw: Draw, live: dict[int, Grads]
    ) -> tuple[Grads, int]:
        """The estimate of the largest node that ends at leaf `count` of its tree, and its level."""
        base = epoch * 2 * self._full() + 2 * (count - 1) - (count - 1).bit_count()
        top = (count & -count).bit_length() - 1
        if self.estimator == "completed":
            return draw(base + top), top
        estimate = draw(base)
        for level in range(1, top + 1):
            own, below = self._weights(level)
            node, left = draw(base + level), live[level - 1]
            estimate = {
                name: own * node[name] + below * (left[name] + value)
                for name, value in estimate.items()
            }
        return estimate, top

    def _complete(
        self, epoch: int, draw: Draw, live: dict[int, Grads]
    ) -> tuple[Grads, dict[int, Grads]]:
        """The estimate of the root after filling the tree of `epoch` with empty steps, and the
        estimates it replaces.
        """
        before, full = dict(live), self._full()
        if self.estimator == "completed":
            return draw(epoch * 2 * full + 2 * full - 2), before
        estimate, level = live[max(live)], max(live)
        for count in range(self.restart + 1, full + 1):
            estimate, level = self._carry(epoch, count, draw, live)
            live = {at: value for at, value in live.items() if at > level} | {level: estimate}
        return estimate, before

    # --- the shape of the trees
    # ---------------------------------------------------------------------------------------------

    def _full(self) -> int:
        return 1 << (self.restart - 1).bit_length() if self.restart else 0

    def _trees(self, steps: int) -> list[tuple[int, int, int]]:
        """(first step, leaves, leaves charged) of each tree; completion charges the full tree."""
        if not self.restart:
            return [(0, steps, steps)]
        firsts = range(0, steps, self.restart)
        return [
            (
                first,
                min(self.restart, steps - first),
                self._full() if self.completion else min(self.restart, steps - first),
            )
            for first in firsts
        ]

    def _variance(self, level: int) -> float:
        return 1.0 if self.estimator == "completed" else 2.0**level / (2.0 ** (level + 1) - 1)

    def _weights(self, level: int) -> tuple[float, float]:
        """Weights of a node's own noise and of its children's sum: inverse to their variances."""
        below = 2 * self._variance(level - 1)
        return below / (below + 1), 1 / (below + 1)

    def _finished(self) -> float:
        """Variance that a finished tree leaves behind."""
        if not self.restart:
            return 0.0
        if self.completion:
            return self._variance(self._full().bit_length() - 1)
        return sum(
            self._variance(level)
            for level in range(self.restart.bit_length())
            if self.restart >> level & 1
        )

    def _prefix_matrix(self, steps: int) -> NDArray[np.float64]:
        import numpy as np

        trees = self._trees(steps)
        size = 2 * (self._full() or steps)
        prefix = np.zeros((steps, size * len(trees)))
        past = np.zeros(size * len(trees))
        for epoch, (first, leaves, _) in enumerate(trees):
            live: dict[int, NDArray[np.float64]] = {}
            for count in range(1, (self._full() if self.completion else leaves) + 1):
                live = self._row(live, count, epoch * size, len(past))
                if count <= leaves:
                    prefix[first + count - 1] = past + sum(live.values())
            past = past + sum(live.values())
        return prefix

    def _row(
        self, live: dict[int, NDArray[np.float64]], count: int, offset: int, width: int
    ) -> dict[int, NDArray[np.float64]]:
        import numpy as np

        base = offset + 2 * (count - 1) - (count - 1).bit_count()
        top = (count & -count).bit_length() - 1
        estimate = np.zeros(width)
        estimate[base] = 1
        for level in range(1, top + 1):
            own, below = (1.0, 0.0) if self.estimator == "completed" else self._weights(level)
            estimate = below * (estimate + live[level - 1])
            estimate[base + level] += own
        return {at: row for at, row in live.items() if at > top} | {top: estimate}


def _live(state: State, count: int, step: int) -> dict[int, Grads]:
    """The node estimates of the state by level; `count` leaves have a live node for each of their
    bits, and no others.
    """
    live: dict[int, Grads] = {}
    for key, value in state.items():
        level, _, name = key.partition(".")
        live.setdefault(int(level) if level.isdecimal() else -1, {})[name] = value
    if sorted(live) != (
        wanted := [level for level in range(count.bit_length()) if count >> level & 1]
    ):
        raise noise_buffers.no_past(
            step, f"nodes of the levels {sorted(live)} where it must hold {wanted}"
        )
    return dict(
        sorted(live.items())
    )  # always in the same order, so that sums are made in the same order


def _match(live: dict[int, Grads], like: Grads, step: int) -> None:
    """Refuse nodes that were made for other parameters."""
    wanted = {name: (t.shape, t.dtype, t.device) for name, t in like.items()}
    for level, node in live.items():
        if {name: (t.shape, t.dtype, t.device) for name, t in node.items()} != wanted:
            raise noise_buffers.no_past(
                step, f"a node of level {level} with other parameters than this step's {list(like)}"
            )


def _minus(estimate: Grads, replaced: dict[int, Grads]) -> Grads:
    """`estimate` less all of the estimates that it takes the place of."""
    result: Grads = {}
    for name, value in estimate.items():
        for old in replaced.values():
            value = value - old[name]
        result[name] = value
    return result
