"""The pages in a real browser: they render at phone and desk width, ask nobody else, and can be
read. Pictures are left to look at.

Set DPFY_SCREENSHOTS to a folder to keep the pictures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import browser

pytestmark = pytest.mark.skipif(browser.why_not() is not None, reason=str(browser.why_not()))


@pytest.fixture(scope="module")
def driver():
    with browser.browser() as made:
        yield made


@pytest.fixture(scope="module")
def shots(tmp_path_factory):
    folder = Path(os.environ.get("DPFY_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def settle(driver):
    browser.requests_made(driver)
    browser.console(driver)


def fits(driver):
    """Nothing sticks out to the right."""
    return driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")


LOOKS = [
    ("dp-sgd", 360, False),
    ("dp-sgd", 360, True),
    ("dp-sgd", 1280, False),
    ("dp-sgd", 1280, True),
]
LOOKS += [
    ("foreign", 360, False),
    ("foreign", 1280, True),
    ("no-privacy", 360, True),
    ("no-privacy", 1280, False),
]


@pytest.mark.parametrize(("name", "width", "dark"), LOOKS)
def test_the_report_renders(driver, made, shots, name, width, dark):
    address = (made(name) / "report.html").as_uri()
    settle(driver)
    browser.resize(driver, width, dark=dark)
    driver.get(address)
    picture = browser.whole_page(driver)
    (shots / f"report-{name}-{width}-{'dark' if dark else 'light'}.png").write_bytes(picture)
    assert len(picture) > 20_000
    assert fits(driver)
    assert browser.console(driver) == []
    assert {url for url in browser.requests_made(driver) if not url.startswith("data:")} == {
        address
    }
    sizes = driver.execute_script(
        "return [...document.querySelectorAll('svg')].map(s => [s.getBoundingClientRect().width, "
        "s.getBoundingClientRect().height])"
    )
    assert len(sizes) >= (3 if name == "no-privacy" else 4 if name != "foreign" else 1)
    assert all(w > 150 and h > 100 for w, h in sizes)
    assert driver.execute_script(browser.CONTRAST) == []
    ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == dark
    red = (
        driver.execute_script("return getComputedStyle(document.querySelector('.caveats')).color")
        .strip("rgb()")
        .split(",")
    )
    assert int(red[0]) > int(red[1]) + 80


def test_the_comparison_renders(driver, made, shots, tmp_path):
    from dpfy.report import compare

    page = tmp_path / "compare.html"
    page.write_text(
        compare.page(compare.compare([made("dp-sgd"), made("user-level"), made("tuned")]))
    )
    for width in (360, 1280):
        settle(driver)
        browser.resize(driver, width)
        driver.get(page.as_uri())
        (shots / f"compare-{width}.png").write_bytes(browser.whole_page(driver))
        assert fits(driver)
        assert browser.console(driver) == []
        assert driver.execute_script(browser.CONTRAST) == []
        assert "cannot be ranked" in driver.find_element("tag name", "body").text


@pytest.fixture(scope="module")
def explorer():
    from dpfy.report.server import Explorer

    with Explorer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def wait(driver, script, seconds=600):
    """Until `script` is true. The deadline is for pages that hang."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if driver.execute_script(f"return {script}"):
            return
        time.sleep(0.05)
    raise AssertionError(
        f"{script} did not come true in {seconds} s; the page says "
        f"{driver.find_element('id', 'problem').text!r}"
    )


def calibrate(fields):
    rate = float(fields["batch"]) / float(fields["records"])
    steps = -(-float(fields["epochs"]) // rate)
    command = [
        sys.executable, "-P", "-m", "dpfy", "plan", "calibrate",
        "--epsilon", fields["epsilon"], "--delta", fields["delta"],
        "--sampling-rate", repr(rate), "--steps", str(int(steps)), "--json",
    ]  # fmt: skip
    return json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    )


def test_the_explorer_moves_with_its_sliders(driver, explorer, shots):
    settle(driver)
    browser.resize(driver, 1280)
    driver.get(explorer.address)
    wait(driver, "document.body.dataset.complete")
    before = float(driver.find_element("id", "noise").text)
    driver.execute_script(
        "const s = document.getElementById('epsilon-slider'); s.value = 0; s.dispatchEvent(new "
        "Event('input', {bubbles: true}));"
    )
    wait(
        driver, "document.body.dataset.shown && document.body.dataset.shown.includes('epsilon=1&')"
    )
    after = float(driver.find_element("id", "noise").text)
    assert after > 1.5 * before
    names = ("records", "batch", "epochs", "epsilon", "delta")
    fields = {
        n: driver.execute_script(f"return document.getElementById('{n}').value") for n in names
    }
    assert fields["epsilon"] == "1"
    answer = calibrate(fields)
    assert after == pytest.approx(answer["noise_multiplier"], rel=6e-4)  # four digits are shown
    assert int(driver.find_element("id", "steps").text.replace(",", "")) == answer["steps"]
    wait(driver, "document.body.dataset.complete === document.body.dataset.shown")
    assert len(driver.find_elements("css selector", "#mechanisms tbody tr")) >= 3
    assert len(driver.find_elements("css selector", "#batches circle")) >= 7
    assert browser.console(driver) == []
    hosts = {
        url.split("/")[2] for url in browser.requests_made(driver) if not url.startswith("data:")
    }
    assert hosts == {f"127.0.0.1:{explorer.server_port}"}
    for width, dark in ((1280, False), (360, False), (1280, True)):
        browser.resize(driver, width, dark=dark)
        (shots / f"explorer-{width}-{'dark' if dark else 'light'}.png").write_bytes(
            browser.whole_page(driver)
        )
        assert fits(driver)
        assert driver.execute_script(browser.CONTRAST) == []


def test_the_explorer_names_a_bad_wish(driver, explorer):
    driver.get(explorer.address)
    wait(driver, "document.body.dataset.shown")
    driver.execute_script(
        "const f = document.getElementById('batch'); f.value = 1e9; f.dispatchEvent(new "
        "Event('input', {bubbles: true}));"
    )
    wait(driver, "document.getElementById('problem').textContent.includes('batch')")


def test_the_explorer_without_its_token_is_refused(driver, explorer):
    driver.get(f"http://127.0.0.1:{explorer.server_port}/")
    assert "refused" in driver.find_element("tag name", "body").text
    assert driver.find_elements("tag name", "input") == []


def test_the_report_prints_on_paper(driver, made):
    """Printed to PDF without an error, on a handful of pages; dark ink on white paper, also for
    those who read in the dark.
    """
    import base64

    browser.resize(driver, 800, dark=True)
    driver.get((made("dp-sgd") / "report.html").as_uri())
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
    assert (
        driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        == "rgb(255, 255, 255)"
    )
    assert driver.execute_script(browser.CONTRAST) == []
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    paper = base64.b64decode(
        driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    )
    assert paper.startswith(b"%PDF")
    assert (
        2
        <= paper.count(b"/Type /Page\n")
        + paper.count(b"/Type /Page ")
        + paper.count(b"/Type /Page/")
        <= 12
    )
