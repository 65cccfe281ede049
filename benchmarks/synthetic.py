"""Synthetic tables of UCI Adult beside mbi's AIM at the same model size and epsilon; and a million
rows of forty columns.

    DPFY_DATA=... python benchmarks/synthetic.py [--epsilon 1] [--size 80] [--mbi VENV/bin/python
    --mechanisms CHECKOUT/mechanisms] python benchmarks/synthetic.py --rows 1000000 --columns 40

mbi lives in an environment of its own (pip install mbi==2.0.0 scipy). Its wheel holds no
mechanisms: AIM is in `mechanisms/aim.py` of a checkout of its repository, which is named by
--mechanisms. This file is run there as a worker. Both are given one thread; what is compared is
processor time and the mean L1 distance of all marginals of three columns. --limit stops the peer
after so many seconds of it.

As it comes, mbi compiles a program for every candidate in every round, and that is nearly all it
does: hours pass. With --plain the marginals of candidates are computed with NumPy, by the same
elimination of variables: the same algorithm and settings, many times faster. Fitting is mbi's own
in both.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

DELTA = 1e-9


def adult():
    """Sizes of the columns, and the records as whole numbers [rows, columns]."""
    folder = Path(os.environ["DPFY_DATA"]) / "adult-discrete"
    sizes = json.loads((folder / "adult-domain.json").read_text())
    with gzip.open(folder / "adult.csv.gz", "rt") as file:
        rows = list(csv.reader(file))
    order = [rows[0].index(name) for name in sizes]
    return sizes, np.array(rows[1:], dtype=np.int64)[:, order]


def error(sizes, real, made, degree):
    """The mean L1 distance of shares over all marginals of so many columns."""
    cells = list(sizes.values())
    found = []
    for clique in itertools.combinations(range(len(cells)), degree):
        shape = [cells[v] for v in clique]
        a, b = (
            np.bincount(
                np.ravel_multi_index(tuple(t[:, v] for v in clique), shape),
                minlength=int(np.prod(shape)),
            )
            / len(t)
            for t in (real, made)
        )
        found.append(np.abs(a - b).sum())
    return float(np.mean(found))


def ours(method, arguments, seed):
    """One synthesis by dpfy: processor seconds and errors."""
    import torch

    from dpfy.runs.run import Run
    from dpfy.synthetic.domain import Domain
    from dpfy.synthetic.plan import SynthesisOptions, SynthesisTerms
    from dpfy.synthetic.run import synthesize_table

    torch.set_num_threads(1)
    sizes, real = adult()
    options = SynthesisOptions(
        method, workload=3, most_cells=int(arguments.size * 2**17), device=arguments.device
    )
    with tempfile.TemporaryDirectory() as place:
        start, began = time.process_time(), time.perf_counter()
        run = Run(Path(place) / "run", seed=seed)
        made = synthesize_table(
            real,
            schema=Domain.of(sizes),
            terms=SynthesisTerms(arguments.epsilon, DELTA),
            run=run,
            options=options,
        )
        seconds, wall = time.process_time() - start, time.perf_counter() - began
        rows = np.loadtxt(made.table, dtype=np.int64, delimiter=",", skiprows=1)
    times = {"cpu_seconds": seconds, "wall_seconds": wall, "device": arguments.device}
    return times | {"pairs": error(sizes, real, rows, 2), "triples": error(sizes, real, rows, 3)}


def theirs(arguments, seed):
    """One run of mbi's AIM in its own environment; None where it passed the limit."""
    command = [
        arguments.mbi,
        __file__,
        "--worker",
        arguments.mechanisms,
        "--epsilon",
        str(arguments.epsilon),
    ]
    command += [
        "--size",
        str(arguments.size),
        "--seed",
        str(seed),
        *(["--plain"] if arguments.plain else []),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    }

    def limit():
        resource.setrlimit(resource.RLIMIT_CPU, (arguments.limit, arguments.limit))

    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, preexec_fn=limit, text=True, check=False
    )
    if done.returncode:
        return {"unfinished_after_cpu_seconds": arguments.limit}
    return json.loads(done.stdout.splitlines()[-1])


def eliminated(potentials, clique, total=1.0):
    """What mbi's `variable_elimination` computes, in the same order, with NumPy: nothing is
    compiled.
    """
    from mbi import Factor, junction_tree
    from scipy.special import logsumexp

    domain, clique = potentials.active_domain, tuple(clique)
    held = [
        (tuple(f.domain.attributes), np.asarray(f.values, np.float64))
        for f in potentials.tables.values()
    ]
    order, _ = junction_tree.greedy_order(
        domain, [names for names, _ in held] + [clique], elim=domain.invert(clique)
    )

    def product(parts, names):
        shape = [
            len(parts) and next((v.shape[n.index(k)] for n, v in parts if k in n), 1) for k in names
        ]
        whole = np.zeros(shape)
        for own, values in parts:
            moved = values.transpose([own.index(k) for k in names if k in own])
            whole = whole + moved.reshape(
                [size if k in own else 1 for k, size in zip(names, shape, strict=True)]
            )
        return whole

    for gone in order:
        parts = [part for part in held if gone in part[0]]
        held = [part for part in held if gone not in part[0]]
        names = tuple(dict.fromkeys(k for own, _ in parts for k in own))
        left = tuple(k for k in names if k != gone)
        held.append((left, logsumexp(product(parts, names), axis=names.index(gone))))
    logs = product([part for part in held if part[0]], clique)
    return Factor(potentials.domain.project(clique), total * np.exp(logs - logsumexp(logs)))


def worker(arguments):
    """In mbi's environment."""
    sys.path.insert(0, arguments.worker)
    from aim import AIM
    from mbi import Dataset, Domain, marginal_oracles

    if arguments.plain:
        marginal_oracles.variable_elimination = eliminated
    sizes, real = adult()
    data = Dataset(
        dict(zip(sizes, real.T, strict=True)), Domain(tuple(sizes), tuple(sizes.values()))
    )
    work = [(clique, 1.0) for clique in itertools.combinations(sizes, 3)]
    start = time.process_time()
    aim = AIM(
        arguments.epsilon,
        DELTA,
        np.random.RandomState(arguments.seed),
        max_model_size=arguments.size,
    )
    _, made = aim.run(data, work)
    seconds = time.process_time() - start
    held = made.to_dict()
    rows = np.stack([np.asarray(held[name]) for name in sizes], axis=1)
    print(
        json.dumps(
            {
                "cpu_seconds": seconds,
                "pairs": error(sizes, real, rows, 2),
                "triples": error(sizes, real, rows, 3),
            }
        )
    )


def large(arguments):
    """Many rows of many columns, from a file, by MST: time and memory of the whole process."""
    columns = [f"c{k}" for k in range(arguments.columns)]
    with tempfile.TemporaryDirectory() as place:
        file, schema = Path(place) / "large.csv", Path(place) / "large.toml"
        rng = np.random.default_rng(0)
        with file.open("wb") as out:
            out.write((",".join(columns) + "\n").encode())
            for start in range(0, arguments.rows, 50_000):
                size = min(50_000, arguments.rows - start)
                block = rng.integers(0, 10, (size, arguments.columns))
                for k in range(1, arguments.columns):
                    block[:, k] = np.where(rng.random(size) < 0.5, block[:, k - 1], block[:, k])
                written = np.full((size, 2 * arguments.columns), ord(","), np.uint8)
                written[:, 0::2], written[:, -1] = block + ord("0"), ord("\n")
                out.write(written.tobytes())
        schema.write_text(
            "".join(
                f'[columns.{c}]\nkind = "number"\nrange = [0, 9]\nrequired = true\n'
                for c in columns
            )
        )
        command = [
            sys.executable,
            "-m",
            "dpfy",
            "synthesize",
            str(file),
            "--schema",
            str(schema),
            "--epsilon",
            "1",
            "--method",
            "mst",
        ]
        start = time.monotonic()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [*command, "--out", str(Path(place) / "run"), "--json"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "rows": arguments.rows,
        "columns": arguments.columns,
        "wall_seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(seconds, 1),
        "peak_gib": round(after.ru_maxrss / 2**20, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--size", type=float, default=80.0, help="megabytes of the model's tables")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--mbi", help="Python of mbi's environment")
    parser.add_argument("--mechanisms", help="folder with mbi's aim.py")
    parser.add_argument(
        "--limit", type=int, default=36_000, help="seconds of processor time for the peer"
    )
    parser.add_argument(
        "--plain", action="store_true", help="the peer computes marginals of candidates with NumPy"
    )
    parser.add_argument("--rows", type=int)
    parser.add_argument("--columns", type=int, default=40)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    if arguments.rows:
        print(json.dumps(large(arguments)))
        return
    for seed in range(arguments.seeds):
        print(
            json.dumps({"who": "dpfy aim", "seed": seed, **ours("aim", arguments, seed)}),
            flush=True,
        )
        if arguments.mbi and arguments.mechanisms:
            print(
                json.dumps({"who": "mbi aim", "seed": seed, **theirs(arguments, seed)}), flush=True
            )


if __name__ == "__main__":
    main()
