"""The engine's own part of a step as CUDA graphs: the model runs as always, what is done with its
gradients is launched whole.

A private step has about as much to compute as a plain one, but in more and smaller pieces; on a
fast GPU the time goes to launching them. The user's forward and backward pass cannot be recorded
without asking, for they may do something else the next time. The norms and sums are the engine's,
and they depend on only the tensors that the layers report. In a training loop these lie at
the same addresses at every step, because torch's allocator gives the same sequence of requests the
same memory. So the work on them is recorded once, and repeated whenever every tensor lies where it
lay.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from dpfy.core.errors import warn
from dpfy.core.values import Bounded
from dpfy.gradients.autograd.tape import LayerReport, Site
from dpfy.gradients.clip import Clip
from dpfy.gradients.cuda_graphs import graphs
from dpfy.gradients.cuda_graphs.grouped_sums import (
    PIECE_BYTES,
    GroupedSums,
    NewSums,
    RepeatedSums,
    Request,
)
from dpfy.gradients.cuda_graphs.recorded_step import (
    End,
    HeldReports,
    Key,
    RecordedReports,
    ReportSection,
)
from dpfy.gradients.engine import Grads, zeros
from dpfy.gradients.engines.bounded_sum import BoundedSum
from dpfy.gradients.per_example.joined import BufferLayout

SECTION = 12
"""Reports that are worked on together."""

SECTION_BYTES = 2**25
"""Gradients of normalisation layers may wait up to this size: nothing else needs them
afterwards.
"""

SAME = 2
"""How many times in a row everything must lie where it lay before the work on it is recorded."""

MOST_RECORDINGS = 24
"""A few for each batch size: what the user still holds of the last step takes turns with what this
one makes.
"""

MOST_MISSES = 3
MOST_WATCHED = 200
"""A loop whose tensors keep moving is not worth watching for ever."""

PAYS = 8
"""How many times a recording must have been repeated, on average, before yet another one is
made.
"""


def bucket_size(expected: float) -> int:
    """A number of rows of which random batches of `expected` units are a few multiples: about a
    sixteenth part, a power of two.
    """
    return 1 << max(3, int(expected / 16).bit_length() - 1) if expected >= 8 else 1


class Recorder:
    """The recordings of one attached engine.

    Guarantees: a recording is repeated only if every tensor it reads is at its address, with its
    shape, strides and dtype, reported by the same layer in the same order with the same facts, for
    the same clip rule, batch size, parameters and numeric settings; in all other cases the work is
    done as usual. The first sum of every recording is compared with that of the usual work. A batch
    with a NaN or an infinity in it is never summed by a recording.
    """

    def __init__(self, sums: BoundedSum) -> None:
        self.sums = sums
        self.on = True
        self.made = self.repeated = 0
        self._recordings: dict[Key, RecordedReports] = {}
        self._watched: dict[Key, tuple[list[Key], int]] = {}
        self._small: dict[Site, bool] = {}
        self._layouts: dict[Key, BufferLayout] = {}
        self.pool = graphs.GraphPool()
        self._idle = 0
        self._ones = torch.empty(0)
        self.problem: Exception | None = None

    def bounded_sum(self, losses: Tensor, clip: Clip, mask: Tensor | None) -> Bounded[Grads] | None:
        """The bounded sum of a model that is steady; None if nothing can be recorded here, and
        nothing was done.
        """
        with graphs.on(losses.device):
            if (problem := graphs.problem(losses.device) or _unfit(clip)) is not None:
                self.give_up(problem)
                return None
            step = ReportedStep(self, Request(clip, mask, losses))
            self.sums.report(losses, step.receive, weights=self._weights(losses))
            return step.finish()

    def _weights(self, losses: Tensor) -> Tensor:
        """Ones like `losses`, the same as at the last step unless somebody wrote into them."""
        ones = self._ones
        if (
            ones.shape != losses.shape
            or ones.dtype is not losses.dtype
            or ones.device != losses.device
            or ones._version
        ):
            self._ones = ones = torch.ones_like(losses)
        return ones

    def layout(self, names: tuple[str, ...], clip: Clip) -> BufferLayout:
        """How the sums of some parameters lie in memory: in one piece if these are all, else where
        there is room.
        """
        params = {name: self.sums.params[name] for name in names}
        key = (
            names,
            clip.coordinates,
            *[p.dtype for p in params.values()],
            next(iter(params.values())).device,
        )
        if key not in self._layouts:
            self._layouts[key] = BufferLayout(
                params,
                clip.coordinates,
                math.inf if len(names) == len(self.sums.params) else PIECE_BYTES,
            )
        return self._layouts[key]

    def waits(self, report: LayerReport) -> int:
        """Bytes that are held only until the report was worked on."""
        site = report.site
        if site not in self._small:
            self._small[site] = all(p.dim() < 2 for p in site.params)
        return report.grad.nbytes if self._small[site] else 0

    def found(self, first: Key) -> tuple[RecordedReports | None, list[Key] | None]:
        """The recording that begins with `first`; or, if one is to be made now, the sections it
        will have.
        """
        recording = self._recordings.pop(first, None)
        if recording is not None:
            self._recordings[first] = recording  # the latest used comes last
            return recording, None
        expected, times = self._watched.get(first, ([], 0))
        if times < SAME or self.made > MOST_RECORDINGS + self.repeated // PAYS:
            return None, None
        if not self._recordings:
            self.pool.clear()
        return None, expected

    def watch(self, keys: list[Key]) -> None:
        """Remember what a step without a recording looked like."""
        expected, times = self._watched.pop(keys[0], ([], 0))
        self._watched[keys[0]] = (keys, times + 1 if keys == expected else 1)
        if len(self._watched) > 2 * MOST_RECORDINGS:
            self._watched.pop(next(iter(self._watched)))
        self._idle += 1
        if self._idle >= MOST_WATCHED:
            self.give_up()

    def repeat(self, recording: RecordedReports) -> None:
        """`recording` served a step."""
        recording.misses = self._idle = 0
        self.repeated += 1
        graphs.release_private_pool()

    def keep(self, recording: RecordedReports) -> None:
        """Take up a new recording; the one that was not used for longest makes room."""
        first = recording.sections[0].key
        self._watched.pop(first, None)
        if len(self._recordings) >= MOST_RECORDINGS:
            self._recordings.pop(next(iter(self._recordings)))
        self._recordings[first] = recording
        self.made += 1

    def missed(self, recording: RecordedReports) -> None:
        """A step that began like `recording` went on differently."""
        recording.misses += 1
        if recording.misses >= MOST_MISSES:
            self._recordings.pop(recording.sections[0].key, None)

    def fail(self, problem: Exception) -> None:
        """A recording could not be made or repeated: say so, once, and work as usual."""
        warn(
            f"the engine's work could not be recorded as CUDA graphs ({type(problem).__name__}: "
            f"{str(problem)[:200]}); steps go on without them, slower; please report it"
        )
        self.give_up(problem)

    def give_up(self, problem: Exception | None = None) -> None:
        """Work as usual from now on."""
        self.on, self.problem = False, problem
        if (
            problem is not None
        ):  # without the frames it went through, for they hold tensors of the step
            problem.__traceback__ = problem.__context__ = problem.__cause__ = None
        self._recordings.clear()
        self._watched.clear()


class ReportedStep:
    """One step: reports come in and are worked on, section by section, by a recording or as
    usual.
    """

    def __init__(self, recorder: Recorder, request: Request) -> None:
        self._recorder, self._request = recorder, request
        self._held = HeldReports(recorder.sums, len(request.losses))
        self._waiting: list[LayerReport] = []
        self._bytes = 0
        self._keys: list[Key] = []
        self._recording: RecordedReports | None = None
        self._left: RecordedReports | None = None
        self._expected: list[Key] | None = None
        self._made: list[ReportSection] = []

    def receive(self, report: LayerReport) -> None:
        """Take up a report, and work on those that wait when there are enough."""
        self._waiting.append(report)
        self._bytes += self._recorder.waits(report)
        if len(self._waiting) >= SECTION or self._bytes >= SECTION_BYTES:
            self._close()

    def _close(self) -> None:
        reports, self._waiting, self._bytes = self._waiting, [], 0
        key: Key = tuple([report.lies() for report in reports])
        place = len(self._keys)
        if not place:
            key = (*self._request.key(self._recorder.sums), *key)
            self._recording, self._expected = self._recorder.found(key)
        self._keys.append(key)
        if self._recording is not None:
            sections = self._recording.sections
            if place < len(sections) and sections[place].key == key:
                try:
                    sections[place].replay()
                except Exception as problem:
                    self._recorder.fail(problem)
                else:
                    self._held.hold(reports, sections[place].own, sections[place].names)
                    return
            self._miss()
        if self._expected is not None:
            if (
                place < len(self._expected) - 1
                and self._expected[place] == key
                and self._record(key, reports)
            ):
                return
            self._expected = None
        with graphs.private_pool():
            worked = self._held.work(reports)
        self._held.hold(reports, worked.own, worked.names)

    def _record(self, key: Key, reports: list[LayerReport]) -> bool:
        """Record the work on `reports`, and do it. False if that cannot be."""
        before = {name: list(uses) for name, uses in self._held.parts.items()}
        try:
            graph, worked = self._recorder.pool.record(
                lambda: self._held.work(reports), reports[0].grad.device, 1 << 12
            )
        except Exception as problem:
            self._held.parts = before
            self._recorder.fail(problem)
            return False
        self._made.append(ReportSection(key, graph, *worked))
        self._made[-1].replay()
        self._held.hold(reports, worked.own, worked.names)
        return True

    def _miss(self) -> None:
        """Go on as usual: from what the recording left of the reports so far, or from the reports
        themselves.
        """
        assert self._recording is not None
        self._recorder.missed(self._recording)
        self._left, self._recording = self._recording, None  # what it left lies in its memory
        self._held.again()

    def finish(self) -> Bounded[Grads]:
        """The bounded sum of all reports."""
        if self._waiting:
            self._close()
        clip = self._request.clip
        if not self._keys:
            return Bounded(zeros(self._recorder.sums.params, clip), clip.bound)
        if self._recording is not None and len(self._recording.sections) != len(self._keys):
            self._miss()
        sums = GroupedSums(self._held, self._request, self._source())
        total = sums.value(self._recorder.layout)
        self._settle(sums)
        return Bounded(total, clip.bound)

    def _source(self) -> RepeatedSums | None:
        """The recording that began, or the one that was started, if everything so far lies where it
        lay.
        """
        if self._recording is not None:
            return RepeatedSums(self._recording, self._request)
        if self._expected is None or self._expected[:-1] != self._keys:
            return None
        mask, pool = self._request.mask, self._recorder.pool
        end, mine = cast(End, self._expected[-1]), None if mask is None else pool.like(mask)
        return NewSums(
            RecordedReports(self._made, end, mine, self._request.losses.device),
            self._request,
            self._held,
            pool,
        )

    def _settle(self, sums: GroupedSums) -> None:
        """Let the recorder know how the step went."""
        source = sums.source
        if source is not None and source.problem is not None:
            self._recorder.fail(source.problem)
        elif source is not None and sums.served:
            if source.new:
                source.recording.share()
                self._recorder.keep(source.recording)
            self._recorder.repeat(source.recording)
        elif source is None or source.new or source.moved:
            if source is not None and not source.new:
                self._recorder.missed(source.recording)
            self._recorder.watch([*self._keys, sums.end])


def _unfit(clip: Clip) -> Exception | None:
    """What keeps a clip rule of the user's own from being told from others."""
    try:
        hash(clip)
    except TypeError as found:
        return found
    return None
