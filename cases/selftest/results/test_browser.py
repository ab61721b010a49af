"""The page in a real browser, where one is installed: no error, every link leads somewhere, a phone scrolls one way only."""

import json
import re
import shutil
import subprocess

import pytest

from cases.selftest.results.runs import (
    CRASH,
    EVIL,
    FINDING,
    GOOD,
    KNOWN,
    LONG,
    UNSUPPORTED,
    about,
    changed,
    night,
    row,
    summary,
)
from parity.results import memory
from parity.results.report import render

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr"),
    *("--allow-file-access-from-files", "--virtual-time-budget=5000", "--dump-dom"),
)
WIDTHS = (390, 1280)
PROBE = """<!doctype html><title>waiting</title>%s<script>
onload = () => { document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
  const page = frame.contentDocument, root = page.documentElement;
  page.querySelectorAll("details").forEach(one => { one.open = true; });
  const beyond = [...page.querySelectorAll("h1, p, nav, summary, dd, pre")]
    .filter(e => e.getBoundingClientRect().right > root.clientWidth + 1 && !e.closest(".wide")).map(e => e.outerHTML);
  const thin = [...page.querySelectorAll("th:first-child, td:first-child")]
    .filter(e => e.textContent.trim().length > 6 && e.getBoundingClientRect().width < 50).map(e => e.outerHTML);
  const links = [...page.links].filter(a => !page.getElementById(decodeURIComponent(a.hash.slice(1)))).map(a => a.href);
  const images = [...page.images].filter(i => !(i.complete && i.naturalWidth)).map(i => i.src.slice(0, 80));
  return { images, title: page.title, width: root.clientWidth, scroll: root.scrollWidth, beyond, thin, links,
           count: page.links.length, first: page.querySelector(".verdict").getBoundingClientRect().bottom };
})); };
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")
def test_in_a_browser(tmp_path):
    for day in range(2):
        night(tmp_path / "history", day, GOOD)
    long = changed(FINDING, implementation=LONG, message=EVIL * 9, replay="parity replay " + "x" * 300)
    of_run = summary(*FINDING, *long, *KNOWN, UNSUPPORTED, CRASH, row(), header=about(1))
    render.write(of_run, render.Ending(1, ["a reason"], folder=tmp_path, past=memory.runs(tmp_path / "history")))
    frames = "".join(f'<iframe src="index.html" width={w} height=900></iframe>' for w in WIDTHS)
    (tmp_path / "probe.html").write_text(PROBE % frames)
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "probe.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    found = json.loads(re.search("<title>(.*?)</title>", done.stdout)[1])
    assert [f["title"] for f in found] == ["parity: 1 unranked known defect seen, 3 new"] * 2
    for frame in found:
        assert frame["scroll"] <= frame["width"] and frame["beyond"] == [], frame
        assert frame["thin"] == [], "names one letter wide"
        assert frame["images"] == [] and frame["links"] == [] and frame["count"] >= 6
        assert frame["first"] < 300, "the verdict is on the first screen"
