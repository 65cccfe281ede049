"""A tokenizer learnt privately: words of private text are counted with noise, and byte pairs are
merged on what was released.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import dpfy
from dpfy.core import check, storage
from dpfy.core.errors import missing
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Person, single_owner
from dpfy.core.values import Bounded, Permit
from dpfy.report import card
from dpfy.runs.dataset import Dataset
from dpfy.runs.folder import RunFolder, complete
from dpfy.runs.released import Released
from dpfy.runs.run import Progress, Run, quiet
from dpfy.text.claim import TOKENIZER, WORDS, VocabularyClaim
from dpfy.text.corpus import DOCUMENT, Texts, corpus_of

END = "<|endoftext|>"
"""The token that ends a text."""
OF_A_DOCUMENT, OF_A_PERSON = 4, 40
"""Words that a unit counts in a round, where nothing is said."""
LONGEST = 64
"""Characters of the longest word that is counted."""
REPEATED = 1 << 20
"""Words that the merges are learnt from: counts are scaled down to as many."""

Words = Counter[str]


@dataclass(frozen=True, repr=False)
class PrivateTokenizer(Released):
    """What `train_tokenizer` leaves: a finished run with the vocabulary."""

    facts: dict[str, Any] = field(repr=False)

    @cached_property
    def tokenizer(self) -> Any:
        """A `tokenizers.Tokenizer`, as Hugging Face reads it."""
        return _library().Tokenizer.from_file(str(self.path))

    @property
    def path(self) -> Path:
        """The file tokenizer.json."""
        return self.run / TOKENIZER

    @property
    def end(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.token_to_id(END))

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return int(self.tokenizer.get_vocab_size())

    @property
    def words(self) -> str:
        """What it is, for the reports of later releases."""
        return f"{self.vocabulary} byte pairs, learnt privately in a release of its own"

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text, without its end."""
        found: list[int] = self.tokenizer.encode(text).ids
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens."""
        return str(self.tokenizer.decode(list(tokens)))

    def _told(self) -> dict[str, Any]:
        return {"tokenizer": str(self.path)} | self.facts


def train_tokenizer(
    data: Any,
    *,
    epsilon: float,
    delta: float | None = None,
    size: int = 4000,
    words: int | None = None,
    unit: Person | None = None,
    records: int | None = None,
    run: Run | str | Path | None = None,
    progress: Progress = quiet,
) -> PrivateTokenizer:
    """Learn a byte-level BPE tokenizer from private texts, in a run folder that anyone can verify.

        tokenizer = train_tokenizer(corpus, epsilon=1.0, size=4000)

    Args:
        data: A `dpfy.Dataset` with one column of text, or of `dpfy.Texts`; or a list of strings.
        epsilon: What the vocabulary costs.
        delta: Without it that of the data set, or the one that follows from `records`.
        size: The most tokens, the 256 bytes and the end of a text among them. There are fewer where
            too few words are frequent enough to be released.
        words: How many different words a unit counts in each of two rounds: 4 of a text, 40 of a
            person, unless said otherwise.
        unit, records: What is public about `data` where it is no Dataset.
        run: The run folder, a `dpfy.Run`, or None for a new folder under runs/.
        progress: Told what is being done.

    Returns:
        The result: `tokenizer`, a `tokenizers.Tokenizer`; `path`, the file tokenizer.json. It is
        also what `dpfy.synthesize` takes as `tokens=`.

    Raises:
        InvalidInput: A setting is wrong, or the data are no texts.
        BudgetExceeded: The budget of the data set does not cover it.

    Guarantees: the claim is reserved before the texts are read. A unit, a text or all texts of a
    person, counts once in at most `words` words of each round. Everything that is published is made
    of words whose noisy count reached the threshold, and of those counts. A killed run goes on to
    the same vocabulary.

    Example:
        >>> from dpfy.text import train_tokenizer
        >>> notes = [f"the patient slept well on day {k % 7}" for k in range(2000)]
        >>> made = train_tokenizer(notes, epsilon=1.0, delta=1e-6, size=300)
        >>> len(made.encode("the patient slept")) < 8
        True
    """
    source = Texts(data) if isinstance(data, list | tuple) else data
    held = Dataset.of(source, unit=unit, records=records)
    _library()
    single_owner("texts", None if held.unit is None else held.unit.column)
    chosen, person = held.rule(delta), held.unit
    most = (OF_A_DOCUMENT if person is None else OF_A_PERSON) if words is None else words
    check.integer("size", size, least=257, most=1 << 20)
    claim = VocabularyClaim.calibrated(
        size,
        most,
        epsilon,
        chosen.value,
        DOCUMENT if person is None else person.unit,
        records=None if person is not None else held.records,
    )
    place, at_most = held.run(run), None if person is None else person.at_most
    return learn(place, lambda: corpus_of(held).units(at_most), claim, chosen.origin, progress)


def learn(
    place: Run,
    read: Callable[[], Sequence[Sequence[str]]],
    claim: VocabularyClaim,
    delta_from: str = "given by the caller",
    progress: Progress = quiet,
) -> PrivateTokenizer:
    """`train_tokenizer` by its claim; `read` gives the texts of each unit.

    Guarantees: those of `train_tokenizer`.
    """
    if complete(place, claim):
        return finished(place.path)
    with RunFolder(place, claim) as folder:
        progress("reading")
        units = read()
        progress("counting words")
        names = [_digest(texts) for texts in units]
        counted = [words_of(texts) for texts in units]
        folder.bind(claim.name, b"".join(sorted(names)))
        permit = folder.begin(claim.name)
        found = released_words(counted, names, claim, permit, folder.randomness)
        progress("merging")
        made = merged(found, claim.size)
        facts = {"tokens": made.get_vocab_size(), "words_released": len(found)}
        folder.write(TOKENIZER, made.to_str(pretty=True).encode())
        folder.write(WORDS, json.dumps(found, indent=1).encode())
        folder.tell(claim.name, **facts, delta_from=delta_from)
        seed = card.FIXED_SEED if folder.randomness.fixed else card.SECRET_SEED
        about = {"dpfy": dpfy.__version__, "python": platform.python_version(), "seed": seed}
        folder.finish(card.Facts(about, releases=claim.releases))
    return finished(place.path)


def finished(path: Path | str) -> PrivateTokenizer:
    """A finished vocabulary."""
    path = Path(path)
    words = storage.parsed_json(WORDS, storage.content(WORDS, path / WORDS))
    made = _library().Tokenizer.from_file(str(path / TOKENIZER))
    facts = {"tokens": made.get_vocab_size(), "words_released": len(words)}
    return PrivateTokenizer.read(path, facts=facts)


def words_of(texts: Iterable[str]) -> Words:
    """The words of a unit, as the tokenizer splits them, with how often each occurs in it."""
    split = _library().pre_tokenizers.ByteLevel(add_prefix_space=False)
    found: Words = Counter()
    for text in texts:
        clean = text.encode("utf-8", "replace").decode("utf-8")
        found.update(word for word, _ in split.pre_tokenize_str(clean) if len(word) <= LONGEST)
    return found


def released_words(
    counted: Sequence[Words],
    names: Sequence[bytes],
    claim: VocabularyClaim,
    permit: Permit,
    randomness: Randomness,
) -> dict[str, float]:
    """Words with their noisy counts, by the rounds of the claim; `names` tells units apart.

    Guarantees: every round is one release of counts to which a unit adds 1 in at most
    `claim.words` words, chosen by its own texts, what was released before and a secret.
    """
    found: dict[str, float] = {}
    for step, mechanism in enumerate(claim.rounds()):
        key = randomness.key("words of a unit", step, 32)
        counts: Counter[Hashable] = Counter()
        for words, name in zip(counted, names, strict=True):
            counts.update(chosen_words(words, found, claim.words, key, name))
        released = mechanism.release(
            Bounded(counts, mechanism.bound), permit, randomness, step
        ).value
        found |= {str(word): count for word, count in released.items()}
    return found


def chosen_words(
    words: Words, known: Mapping[str, object], most: int, key: bytes, name: bytes
) -> list[str]:
    """The words that a unit counts: its most frequent ones that are not known yet, in a secret
    order where they are as frequent.
    """
    left = [word for word in words if word not in known]
    if len(left) <= most:
        return left

    def place(word: str) -> tuple[int, bytes]:
        secret = hashlib.blake2b(name + word.encode(), digest_size=8, key=key)
        return -words[word], secret.digest()

    return sorted(left, key=place)[:most]


def merged(counts: Mapping[str, float], size: int) -> Any:
    """Byte pairs merged on words with these counts, as a tokenizer of at most `size` tokens.

    Guarantees: a function of its arguments alone, the same in every process.
    """
    library = _library()
    made = library.Tokenizer(library.models.BPE())
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=0,
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END],
        show_progress=False,
    )
    total = sum(max(0.0, count) for count in counts.values())
    scale = min(1.0, REPEATED / total) if total else 1.0
    lines = ([word] * max(1, round(count * scale)) for word, count in sorted(counts.items()))
    made.train_from_iterator(lines, trainer=trainer)
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    return made


def _digest(texts: Sequence[str]) -> bytes:
    """A unit by its texts."""
    whole = hashlib.blake2b(digest_size=16)
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        whole.update(len(content).to_bytes(8, "little") + content)
    return whole.digest()


def _library() -> Any:
    """The package tokenizers."""
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise missing("a private tokenizer", "tokenizers") from None
    return tokenizers
