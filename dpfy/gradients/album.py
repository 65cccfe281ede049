"""The recordings of one engine, and what steps looked like that may become some.

In a training loop tensors lie at the same addresses at every step, or take turns in a few: what the user still holds of the last step
is in the way of this one. So there may be several recordings that begin alike.
"""

from __future__ import annotations

from dpfy.gradients.recording import Key, Recording, roughly

SAME = 2
"""How many times everything must have lain where it lies before the work on it is recorded."""

MOST_RECORDINGS = 24
"""A few for each batch size."""

MOST_TURNS = 4
"""How many recordings may begin alike: the work on what they have in common is done for each of them, in memory of its own."""

MOST_MISSES = 8
"""How many times in a row a recording may have begun like a step and not have been it."""

MOST_VAIN = 8
"""How many steps in a row may be recorded and turn out to be others than were to be recorded, before these are forgotten."""

MOST_WATCHED = 200
"""A loop whose tensors keep moving is not worth watching for ever."""

PAYS = 8
"""How many times a recording must have been repeated, on average, before yet another one is made."""


class Album:
    """Recordings by their first key. `rough`: small tensors may lie anywhere, recordings copy them to places of their own."""

    def __init__(self) -> None:
        self.made = self.repeated = 0
        self.rough = False
        self.recordings: dict[Key, list[Recording]] = {}
        self._watched: dict[Key, dict[tuple[Key, ...], int]] = {}
        self._lay: dict[tuple[Key, ...], list[Key]] = {}
        self._idle = self._vain = 0

    @property
    def hopeless(self) -> bool:
        """Whether too many steps in a row found no recording."""
        return self._idle >= MOST_WATCHED

    def found(self, first: Key) -> tuple[list[Recording], bool]:
        """The recordings that begin with `first`; or none of them and True, if this step is to be recorded."""
        wanted = any(times >= SAME for times in self._watched.get(first, {}).values())
        if wanted and self.made <= MOST_RECORDINGS + self.repeated // PAYS:
            return [], True
        return self.recordings.get(first, []), False

    def turn(self, first: Key) -> int:
        """A number that no recording has which begins with `first`."""
        taken = {recording.turn for recording in self.recordings.get(first, ())}
        return next(i for i in range(MOST_TURNS + 1) if i not in taken)

    def ready(self, keys: list[Key]) -> bool:
        """Whether steps like this one are to be recorded. If not, it is one that began like those, which may still come."""
        seen = self._watched.get(keys[0], {})
        if seen.get(tuple(keys[1:]), 0) >= SAME:
            return True
        self._vain += 1
        if self._vain >= MOST_VAIN:
            self._vain = 0
            del self._watched[keys[0]]
        return False

    def watch(self, keys: list[Key], end: Key) -> None:
        """Remember what a step without a recording looked like; `end`: the last key without the places of what is small."""
        self._idle += 1
        if not self.rough and self._only_small_ones_moved(keys, end):
            self.rough = True
            self.clear()
            return
        first, rest = keys[0], tuple(keys[1:])
        if any(recording.keys == keys for recording in self.recordings.get(first, ())):
            return
        seen = self._watched.pop(first, {})
        seen[rest] = seen.pop(rest, 0) + 1  # the latest comes last
        if len(seen) > MOST_TURNS:
            seen.pop(next(iter(seen)))
        self._watched[first] = seen
        if len(self._watched) > 2 * MOST_RECORDINGS:
            self._watched.pop(next(iter(self._watched)))

    def _only_small_ones_moved(self, keys: list[Key], end: Key) -> bool:
        """Whether there was a step that differed from this one in nothing else."""
        large = (*roughly(keys[:-1]), end)
        before = self._lay.pop(large, keys)
        self._lay[large] = keys
        if len(self._lay) > 2 * MOST_RECORDINGS:
            self._lay.pop(next(iter(self._lay)))
        return keys != before

    def repeat(self, recording: Recording) -> None:
        """`recording` served a step."""
        self.repeated += 1
        recording.misses, recording.used = 0, self.repeated
        self._idle = 0

    def keep(self, recording: Recording) -> None:
        """Take up a new recording; those that were not used for longest make room."""
        first, *rest = recording.keys
        self._watched.get(first, {}).pop(tuple(rest), None)
        self.made, self._vain = self.made + 1, 0
        recording.used = self.repeated
        self.recordings.setdefault(first, []).append(recording)
        if len(alike := self.recordings[first]) > MOST_TURNS:
            self._drop(min(alike, key=lambda each: each.used))
        every = [each for alike in self.recordings.values() for each in alike]
        if len(every) > MOST_RECORDINGS:
            self._drop(min(every, key=lambda each: each.used))

    def missed(self, recordings: list[Recording]) -> None:
        """A step that began like these went on differently."""
        for recording in recordings:
            recording.misses += 1
            if recording.misses >= MOST_MISSES:
                self._drop(recording)

    def _drop(self, recording: Recording) -> None:
        first = recording.keys[0]
        alike = [each for each in self.recordings.get(first, ()) if each is not recording]
        if alike:
            self.recordings[first] = alike
        else:
            self.recordings.pop(first, None)

    def clear(self) -> None:
        """Forget everything that was recorded and watched."""
        self.recordings.clear()
        self._watched.clear()
        self._lay.clear()
