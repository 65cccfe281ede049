"""Debian's chromium, driven by selenium, for the tests of pages. Missing pieces are a reason to
skip, in words.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HOW = "apt-get install -y --no-install-recommends chromium chromium-driver fonts-dejavu-core"

CONTRAST = """
const parse = c => { const m = c.match(/[\\d.]+/g).map(Number); return m.length > 3 ? m : [...m.slice(0, 3), 1]; };
const lum = c => { const f = c.slice(0, 3).map(v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
  return .2126 * f[0] + .7152 * f[1] + .0722 * f[2]; };
const backdrop = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c[3] > .99) return c; }
  return [255, 255, 255, 1]; };
const low = [];
for (const e of document.querySelectorAll('body *')) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || !e.getClientRects().length || ['STYLE', 'SCRIPT', 'OPTION'].includes(e.tagName)) continue;
  const style = getComputedStyle(e), svg = e instanceof SVGElement;
  const a = lum(parse(svg ? style.fill : style.color)), b = lum(backdrop(svg ? e.ownerSVGElement : e));
  const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  const large = parseFloat(style.fontSize) >= 24;
  if (ratio < (large ? 3 : 4.5)) low.push([e.textContent.trim().slice(0, 40), ratio]);
}
return low;
"""  # noqa: E501
"""Texts whose contrast is below WCAG AA: 4.5 for normal text, 3 for large."""


def why_not() -> str | None:
    """Why there is no browser here; None if there is one."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed (pip install selenium)"
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        return f"chromium is not installed ({HOW})"
    return None


@contextmanager
def browser(*, dark: bool = False, scripts: bool = True) -> Iterator[Any]:
    """A headless chromium that logs its console and every request."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",  # noqa: E501
                 "--no-first-run", "--disable-component-update", "--disable-extensions", "--hide-scrollbars"):  # fmt: skip  # noqa: E501
        options.add_argument(flag)
    if dark:
        options.add_argument("--blink-settings=preferredColorScheme=0")
    if not scripts:
        options.add_experimental_option(
            "prefs", {"profile.managed_default_content_settings.javascript": 2}
        )
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.set_page_load_timeout(600)
        yield driver
    finally:
        driver.quit()


def resize(driver: Any, width: int, height: int = 900, *, dark: bool = False) -> None:
    """A window that is exactly `width` wide inside, in the colours asked for."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def whole_page(driver: Any) -> bytes:
    """A picture of the whole page."""
    import base64

    shot = driver.execute_cdp_cmd(
        "Page.captureScreenshot", {"captureBeyondViewport": True, "format": "png"}
    )
    return base64.b64decode(shot["data"])


def requests_made(driver: Any) -> list[str]:
    """Every address that was asked for since the last call."""
    found = []
    for row in driver.get_log("performance"):
        message = json.loads(row["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            found.append(message["params"]["request"]["url"])
    return found


def console(driver: Any) -> list[str]:
    """Warnings and errors of the console since the last call."""
    return [
        row["message"] for row in driver.get_log("browser") if row["level"] in ("SEVERE", "WARNING")
    ]
