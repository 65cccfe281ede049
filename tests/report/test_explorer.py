"""The explorer: its figures are those of `dpfy plan calibrate`, its server answers this machine and this
token only.
"""

from __future__ import annotations

import json
import math
import threading
import urllib.error
import urllib.request
from urllib.parse import urlencode, urlsplit

import pytest

from dpfy import accounting
from dpfy.accounting import planning
from dpfy.core.errors import InvalidInput
from dpfy.report import explorer
from dpfy.report.explorer import Wish
from dpfy.report.server import HOME, Explorer

WISHES = [
    Wish(60_000, 4096.0, 40.0, 3.0, 1e-5),
    Wish(60_000, 256.0, 5.0, 1.0, 1e-6),
    Wish(5_000, 5_000.0, 10.0, 0.5, 1e-5),
    Wish(1_000_000, 1000.0, 1.0, 2.0, 1e-8),
    Wish(1_000, 100.0, 3.0, 8.0, 1e-4),
]


@pytest.mark.parametrize("wish", WISHES, ids=lambda w: f"{w.records}-{w.batch:g}-{w.epsilon:g}")
def test_noise_is_that_of_calibrate(wish):
    found = explorer.answer(wish)
    assert found["noise_multiplier"] == pytest.approx(
        planning.noise(wish.epsilon, wish.rate, wish.steps, wish.delta), rel=1e-4
    )
    reached = planning.epsilon(found["noise_multiplier"], wish.rate, wish.steps, wish.delta)
    assert found["epsilon"] == pytest.approx(reached, rel=1e-9)
    assert wish.epsilon * (1 - 1e-4) <= reached <= wish.epsilon  # the private side


def test_the_order_of_slider_positions_does_not_matter():
    """The search begins where the last one ended; what it finds does not depend on it."""
    forward = [
        explorer.solve.__wrapped__(Wish(10_000, 500.0, 10.0, 0.3 * 2.5**k, 1e-6))[0]
        for k in range(4)
    ]
    backward = [
        explorer.solve.__wrapped__(Wish(10_000, 500.0, 10.0, 0.3 * 2.5**k, 1e-6))[0]
        for k in reversed(range(4))
    ]
    assert forward == pytest.approx(backward[::-1], rel=1e-4)


def test_a_user_with_several_examples_costs_more():
    one, three = Wish(10_000, 500.0, 10.0, 2.0, 1e-6), Wish(10_000, 500.0, 10.0, 2.0, 1e-6, owns=3)
    assert explorer.noise(three) > 2 * explorer.noise(one)
    assert accounting.epsilon(three.event(explorer.noise(three)), 1e-6) <= 2.0


def test_commands_do_what_the_page_shows():
    wish = WISHES[0]
    train, check = explorer.commands(wish)
    expected = (
        "dpfy train data.job.toml --records 60000 --batch-size 4096 --epochs 40 --epsilon 3 "
        "--delta 1e-05"
    )
    assert train == f"{expected}   # dpfy init data.csv makes data.job.toml"
    words = check.split()
    assert float(words[words.index("--sampling-rate") + 1]) == wish.rate
    assert int(words[words.index("--steps") + 1]) == wish.steps == 586


def test_steps_are_those_of_the_recipe():
    from dpfy.plan.recipe import dpsgd

    for wish in WISHES:
        assert dpsgd(wish.records, wish.batch, epochs=wish.epochs).steps == wish.steps


def test_batch_points_are_exact_and_level_off_at_the_knee():
    found = explorer.batches(WISHES[0])["points"]
    for size, value in (found[1], found[5]):
        assert value * size == pytest.approx(
            planning.noise(3.0, size / 60_000, 586, 1e-5), rel=1e-4
        )
    assert found[0][1] / found[1][1] > 2.5  # far below the knee noise falls almost as 1/batch
    assert found[-2][1] / found[-1][1] < 1.05  # beyond it, it stays


def test_attacker_and_mechanisms():
    wish = WISHES[0]
    assert len(explorer.attacker(wish)["sentences"]) == 2
    quick = explorer.mechanisms(wish, optimised=False)
    assert quick["rows"][0]["mechanism"] == "DP-SGD"
    assert {row["sampling"] for row in quick["rows"]} == {"Poisson sampling", "fixed order"}
    errors = [row["error"] for row in quick["rows"]]
    assert errors == sorted(errors)
    # the identity leaves sigma / batch in each step: the root mean square over prefixes is sqrt((T
    # + 1) / 2) of it
    assert errors[0] == pytest.approx(explorer.noise(wish) / 4096 * math.sqrt(587 / 2), rel=1e-9)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("records", "0", "records"), ("batch", "1e9", "batch"), ("epsilon", "-1", "epsilon"), ("delta", "1", "delta"),
     ("epochs", "nan", "epochs"), ("owns", "1000", "owns"), ("records", "many", "records"), ("surprise", "1", "surprise")],  # noqa: E501
)  # fmt: skip
def test_bad_wishes_are_named(field, value, named):
    fields = {
        "records": "1000",
        "batch": "100",
        "epochs": "1",
        "epsilon": "1",
        "delta": "1e-5",
        "owns": "1",
    }
    with pytest.raises(InvalidInput, match=named):
        Wish.parse(fields | {field: value})


@pytest.fixture(scope="module")
def server():
    with Explorer() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def get(address, headers=None):
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, headers=headers or {}), timeout=600
        ) as reply:
            return reply.status, reply.headers, reply.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.headers, refused.read().decode()


FIELDS = {"records": 60000, "batch": 4096, "epochs": 40, "epsilon": 3, "delta": 1e-5, "owns": 1}


def test_the_server_listens_on_this_machine_alone(server):
    assert server.server_address[0] == HOME == "127.0.0.1"


def test_without_its_token_the_address_is_refused(server):
    port = server.server_port
    token = urlsplit(server.address).path.strip("/")
    assert len(token) >= 32
    for path in (
        "/",
        "/answer",
        f"/{token[:-1]}/",
        f"/{token}x/",
        f"/answer?{urlencode(FIELDS)}",
        "/%00/",
        f"/../{token}",
    ):
        status, _, text = get(f"http://{HOME}:{port}{path}")
        assert status == 403, path
        assert token not in text
    assert get(server.address)[0] == 200


def test_a_foreign_host_name_is_refused(server):
    assert get(server.address, {"Host": "evil.example"})[0] == 403
    assert get(server.address, {"Host": f"localhost:{server.server_port}"})[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
    ids=str,
)
def test_a_page_of_another_site_is_refused(server, headers):
    status, sent, _ = get(server.address, headers)
    assert status == 403
    assert not [name for name in sent if name.lower().startswith("access-control")]


def test_its_own_page_and_a_link_that_a_person_follows_are_served(server):
    own = {
        "Origin": f"http://{HOME}:{server.server_port}",
        "Sec-Fetch-Site": "same-origin",
        "Sec-Fetch-Mode": "cors",
    }
    for headers in (
        own,
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    ):
        assert get(server.address, headers)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_only_questions_are_answered_and_a_large_body_is_told_so(server, method):
    for _ in range(3):
        request = urllib.request.Request(server.address, data=b"x" * 6_000_000, method=method)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=600)
        assert (refused.value.code, refused.value.headers["Allow"]) == (405, "GET")
    request = urllib.request.Request(server.address, data=b"x" * 6_000_000, method="GET")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request, timeout=600)


def test_two_servers_have_different_tokens(server):
    with Explorer() as other:
        assert other.token != server.token


def test_answers_and_problems(server):
    status, headers, text = get(f"{server.address}answer?{urlencode(FIELDS)}")
    assert status == 200
    assert headers["Cache-Control"] == "no-store"
    found = json.loads(text)
    assert found["noise_multiplier"] == pytest.approx(
        planning.noise(3.0, 4096 / 60000, 586, 1e-5), rel=1e-4
    )
    status, _, text = get(f"{server.address}answer?{urlencode(FIELDS | {'batch': 10**9})}")
    assert status == 200
    assert "batch" in json.loads(text)["problem"]
    assert get(f"{server.address}nothing")[0] == 404


def test_the_page_asks_nobody_else(server):
    _, headers, page = get(server.address)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "http:" not in page
    assert "https:" not in page
    assert server.token not in page


HOSTILE = [
    "1e-320",
    "5e-324",
    "1e308",
    "1e309",
    "nan",
    "inf",
    "-1",
    "0",
    "9" * 400,
    "9" * 5000,
    "",
    "x",
    "\0",
    "1e-16",
    "1e300",
]


@pytest.mark.parametrize("field", list(FIELDS))
def test_hostile_numbers_get_an_answer(server, field):
    """Each is answered in words, and the connection is not dropped."""
    for value in HOSTILE:
        for page in ("answer", "attacker", "batches"):
            status, _, text = get(f"{server.address}{page}?{urlencode(FIELDS | {field: value})}")
            assert status == 200, (field, value)
            found = json.loads(text, parse_constant=lambda word: pytest.fail(word))
            assert "problem" in found or value in ("1e-16", "1e300", "0", "1e-320", "5e-324"), (
                field,
                value,
                text[:200],
            )


def test_malformed_questions_are_refused(server):
    assert get(f"{server.address}answer?" + "&".join(f"a{k}=1" for k in range(1000)))[0] == 200
    assert get(f"{server.address}answer?" + "x" * 70_000)[0] == 414
    request = urllib.request.Request(server.address, data=b"x" * 10, method="GET")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request, timeout=600)


def test_silent_and_slow_clients_hold_no_thread(monkeypatch):
    """More silent clients than there is room for: they are cut off, and a person is served."""
    import socket
    import time

    from dpfy.report import server as module

    monkeypatch.setattr(module, "SILENT", 1.0)
    monkeypatch.setattr(module._Handler, "timeout", 1.0)
    monkeypatch.setattr(module, "CONNECTIONS", 8)
    with Explorer() as made:
        threading.Thread(
            target=made.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        ).start()
        before = threading.active_count()
        held = [socket.create_connection((HOME, made.server_port)) for _ in range(20)]
        slow = held[0]
        stopped = time.monotonic() + 600  # only a server that hangs takes so long
        while time.monotonic() < stopped:
            try:
                slow.sendall(b"G")
            except OSError:
                break
            time.sleep(0.2)
        else:
            pytest.fail("a client that sends byte by byte was not cut off in ten minutes")
        assert threading.active_count() <= before + 8
        while not _served(made.address):
            assert time.monotonic() < stopped, "nobody was served in ten minutes"
        assert not [c for c in held if not _ended(c)]
        made.shutdown()


def _served(address):
    """Whether a person gets the page. On a busy machine they may be cut off for being slow, too."""
    try:
        return get(address)[0] == 200
    except OSError:
        return False


def _ended(connection):
    """Whether the other side has closed the connection."""
    connection.settimeout(600)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    finally:
        connection.close()
