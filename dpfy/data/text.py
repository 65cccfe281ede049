"""Plain text as records of bytes: the vocabulary is the 256 values of a byte, so none is learnt
from the text.
"""

from __future__ import annotations

import numpy as np
import torch

from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.files import DataFile, DataFolder
from dpfy.data.config import DataConfig
from dpfy.data.dataset import DataSource, Encoded, assemble
from dpfy.data.records import Records

VOCABULARY = 256


def chunks(file: DataFile, length: int) -> Records:
    """Records (inputs, targets) of `length` bytes each; targets are the inputs moved by one.

    The text is cut every `length + 1` bytes and the rest is dropped.

    Guarantees: no byte of the text is in two records, so one record is one unit of privacy.
    """
    content = file.read()
    if b"\0" in content:
        raise Corrupt(file.name, "not plain text (it holds zero bytes)")
    count = len(content) // (length + 1)
    if count < 1:
        raise InvalidInput(
            file.name,
            f"{len(content)} bytes",
            f"must hold at least one record of {length + 1} bytes",
        )
    rows = np.frombuffer(content, dtype=np.uint8, count=count * (length + 1)).reshape(
        count, length + 1
    )
    symbols = torch.from_numpy(rows.astype(np.int64))
    return Records((symbols[:, :-1].contiguous(), symbols[:, 1:].contiguous()))


def from_config(config: DataConfig) -> DataSource:
    """Text from the files that the configuration names."""
    assert config.path is not None
    train = Encoded(chunks(DataFile.given(config.path), config.length))
    test = (
        None
        if config.test_path is None
        else Encoded(chunks(DataFile.given(config.test_path), config.length))
    )
    return assemble(train, test, config, VOCABULARY, f"text in records of {config.length} bytes")


def shakespeare(config: DataConfig) -> DataSource:
    """Shakespeare's plays from the data folder."""
    file = DataFolder.find(config.dir).file("shakespeare", "input.txt.gz", "input.txt")
    train = Encoded(chunks(file, config.length))
    return assemble(
        train, None, config, VOCABULARY, f"Shakespeare's plays in records of {config.length} bytes"
    )
