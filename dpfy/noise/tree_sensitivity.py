"""Which tree nodes a unit touches, and how often: the exact sensitivity of tree noise.

A tree is (first step, leaves, leaves billed); a node is billed when it is complete within the
billed leaves.
"""

from __future__ import annotations

import numpy as np

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
