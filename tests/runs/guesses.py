"""What users of PyTorch, scikit-learn and pandas write at the first try: 36 guesses, each with what
must come of it. `None`: it works. A text: it is refused in one line that holds this text.
"""

from __future__ import annotations

SETUP = """
import numpy as np
import pandas as pd
import torch
from torch import nn

import dpfy
from dpfy.estimators import KMeans, LogisticRegression

rng = np.random.default_rng(0)
age = rng.integers(18, 90, 600)
frame = pd.DataFrame(
    {
        "patient": rng.integers(0, 300, 600),
        "age": age,
        "job": rng.choice(["clerk", "nurse"], 600),
        "income": np.where(age > 50, "high", "low"),
    }
)
frame.to_csv("people.csv", index=False)
columns = [
    dpfy.Number("age", 0, 100),
    dpfy.Category("job", ["clerk", "nurse"]),
    dpfy.Label("income", ["low", "high"]),
]
people = dpfy.Dataset(
    frame, schema=columns, ledger="people.jsonl", budget=dpfy.Budget(900, 1e-6)
)
net = nn.Linear(people.width, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(200, 4), torch.randint(0, 2, (200,))
"""

GUESSES: dict[str, tuple[str, str | None]] = {
    # pandas
    "a csv file": ('dpfy.Dataset("people.csv", schema=columns)', None),
    "a frame": ("dpfy.Dataset(frame, schema=columns)", None),
    "a schema in TOML": (
        'open("s.toml", "w").write(people.schema.to_toml()); dpfy.Dataset(frame, "s.toml")',
        None,
    ),
    "a dict of arrays": (
        'dpfy.query(dict(frame), "mean(age)", schema=columns, epsilon=1.0, delta=1e-6)',
        None,
    ),
    "a budget as a pair": (
        'dpfy.Dataset(frame, columns, ledger="other.jsonl", budget=(2, 1e-6)).left()',
        None,
    ),
    "head": ("people.head()", "private rows are not shown"),
    "shape": ("people.shape", "how many rows there are is private"),
    "columns": ('assert people.columns == ["age", "job", "income"]', None),
    "to_frame of answers": ('dpfy.query(people, "mean(age)", epsilon=1.0).to_frame()', None),
    "answers in a loop": (
        '[a.value for a in dpfy.query(people, "count() by job", epsilon=1.0)]',
        None,
    ),
    "the first answer": ('float(dpfy.query(people, "count()", epsilon=1.0)[0].value)', None),
    "answers on screen": ('str(dpfy.query(people, "count()", epsilon=1.0))', None),
    "the same question twice": (
        '[dpfy.query(people, "count()", epsilon=1.0) for _ in range(2)]',
        None,
    ),
    "epsilon of a result": ('dpfy.query(people, "count()", epsilon=1.0).epsilon <= 1.0', None),
    "read_csv": ('dpfy.read_csv("people.csv")', "dpfy.Dataset"),
    # scikit-learn
    "fit(X, y)": (
        'LogisticRegression(epsilon=1.0, bounds=(0, 100), classes=["low", "high"])'
        '.fit(frame[["age"]], frame["income"]).predict(frame[["age"]])',
        None,
    ),
    "fit(dataset, target)": ('LogisticRegression(epsilon=1.0).fit(people, target="income")', None),
    "fit(dataset)": ("LogisticRegression(epsilon=1.0).fit(people)", None),
    "clusters of a dataset": (
        'KMeans(n_clusters=2, epsilon=1.0).fit(dpfy.Dataset(frame[["age"]], columns[:1]))',
        None,
    ),
    "a person as unit": (
        "LogisticRegression(epsilon=1.0).fit(dpfy.Dataset(frame, columns,"
        ' unit=dpfy.Person("patient", at_most=3)))',
        None,
    ),
    "load an estimator": (
        'LogisticRegression(epsilon=1.0, run="e").fit(people); dpfy.load("e")',
        None,
    ),
    "predict from a run": (
        'LogisticRegression(epsilon=1.0, run="p").fit(people);'
        'frame[["age", "job"]].to_csv("rows.csv", index=False);'
        'dpfy.predict("p", "rows.csv").predicted()',
        None,
    ),
    "GridSearchCV": ("dpfy.GridSearchCV", "dpfy.tune"),
    "LogisticRegression at the top": ("dpfy.LogisticRegression", "dpfy.estimators"),
    # PyTorch and Opacus
    "fit a network": (
        "dpfy.fit(net, people, optimizer=opt, epsilon=3.0, epochs=1, batch_size=100)",
        None,
    ),
    "fit tensors": (
        "net = nn.Linear(4, 2); dpfy.fit(net, (x, y), optimizer=torch.optim.Adam(net.parameters()),"
        " epsilon=3.0, delta=1e-5, epochs=1, batch_size=50)",
        None,
    ),
    "fit a TensorDataset": (
        "net = nn.Linear(4, 2); dpfy.fit(net, torch.utils.data.TensorDataset(x, y), records=200,"
        " optimizer=torch.optim.Adam(net.parameters()), epsilon=3.0, epochs=1, batch_size=50)",
        None,
    ),
    "the result is the model": (
        "dpfy.fit(net, people, optimizer=opt, epsilon=3.0, epochs=1, batch_size=100)"
        "(torch.zeros(1, people.width))",
        None,
    ),
    "a run by its path": (
        'dpfy.fit(net, people, optimizer=opt, epsilon=3.0, epochs=1, batch_size=100, run="r");'
        'dpfy.load("r", net)',
        None,
    ),
    "resume": ('dpfy.query(people, "count()", epsilon=1.0, run=dpfy.Run("q", resume=True))', None),
    "PrivacyEngine": ("dpfy.PrivacyEngine()", "dpfy.from_opacus"),
    # the rest of the surface
    "synthesize": ('dpfy.synthesize(people, epsilon=1.0, method="mst").to_frame()', None),
    "serve": (
        "with dpfy.serve(people, epsilon=4.0, answers=5) as service:"
        ' service.answer({"age": 70, "job": "nurse"}).label',
        None,
    ),
    "verify a result": (
        'assert all(f.holds for f in dpfy.query(people, "count()", epsilon=1.0).verify())',
        None,
    ),
    "spent and left": ("float(people.spent()) + float(people.left())", None),
    "guarantee at another delta": (
        'dpfy.query(people, "count()", epsilon=1.0).guarantee.epsilon(1e-9)',
        None,
    ),
}
