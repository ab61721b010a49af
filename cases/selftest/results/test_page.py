"""The page: strips of tokens, what its filter reads; and the filter itself, where a browser is."""

import json
import re
import subprocess
import sys

import pytest

from cases.selftest.results.runs import FINDING, KNOWN, everything, row, summary
from parity.results.report import render
from parity.results.report.render import strips


def test_signs_are_levels_and_masks():
    of_run = summary(row(), row(quantity="logps", verdict="disagree", tokens=["0a", "9j"]))
    ((shown, signs),) = strips(of_run.findings[0])
    assert (shown.quantity, signs) == ("logps", [[(0, False), (0, True)], [(9, False), (9, True)]])


def test_the_strip_is_of_the_smallest_case_that_shows_where():
    cases = {"a": ["9"], "b": ["90"] * 16, "c": ["90"] * 4, "d": []}
    found = summary(*(row(case, verdict="disagree", tokens=tokens) for case, tokens in cases.items())).findings[0]
    assert [one.case for one, _ in strips(found)] == ["c"]
    assert [one.case for one, _ in strips(summary(row(verdict="disagree", tokens=["9"])).findings[0])] == ["policy-1"]


def test_the_page_shows_where_a_finding_is():
    page = render.page(summary(row(verdict="disagree", tokens=["09", "j0"])))
    assert '<i class="e0"></i><i class="e9"></i>' in page and '<i class="e9 m"></i>' in page


def test_what_the_filter_reads_is_on_every_finding_defect_and_implementation():
    of_run = everything()
    page = render.page(of_run)
    read = r'<(\w+)[^>]* data-library="(.*?)" data-loss="(.*?)" data-dtype="(.*?)" data-verdict="(.*?)">'
    found = re.findall(read, page)
    defects = [("tr", *words) for words in [("other ", "policy", "", "known")] * 3 + [("lib ", "policy", "", "known")]]
    assert sorted(one for one in found if one[4] == "known" and one[0] == "tr" and not one[3]) == sorted(defects)
    assert ("details", "lib", "policy", "bf16", "crashed") in found
    assert ("details", "lib", "policy", "bf16", "known disagree") in found
    assert len(found) == len(of_run.stack.entries) + len(of_run.findings) + len(of_run.known) + len(of_run.lines)


def test_code_in_a_text_is_shown_as_code_and_markup_as_text():
    assert render.ticks("`apply` <b>`x<y`") == "<code>apply</code> &lt;b&gt;<code>x&lt;y</code>"
    assert "<td><code>apply</code></td>" in render.page(everything())


BROWSER = """
import json, os, sys
os.environ["QT_QPA_PLATFORM"], os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "offscreen", "--no-sandbox --disable-gpu"
from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication
app, view = QApplication(sys.argv[:1]), None
view = QWebEngineView()
view.resize(390, 800)
def done(answer):
    print("ANSWER " + json.dumps(answer))
    app.quit()
view.loadFinished.connect(lambda ok: view.page().runJavaScript(sys.argv[2], done))
view.load(QUrl.fromLocalFile(sys.argv[1]))
view.show()
QTimer.singleShot(60000, app.quit)
app.exec()
"""
ASK = """(() => {
  const form = document.forms[0], rows = [...document.querySelectorAll("[data-loss]")], said = {};
  said.choices = [...form.verdict.options].map((one) => one.text);
  said.wide = document.documentElement.scrollWidth <= innerWidth;
  form.verdict.value = "crashed";
  form.oninput();
  said.crashed = rows.filter((row) => !row.hidden).map((row) => row.dataset.verdict);
  said.told = form.querySelector("output").value;
  form.verdict.value = "";
  form.querySelector("input").value = "GRAD_hidden";
  form.oninput();
  said.text = rows.filter((row) => !row.hidden).length;
  said.open = document.querySelector("details.group").open;
  return said;
})()"""


def test_a_browser_filters_the_page_on_a_phone(tmp_path):
    pytest.importorskip("PyQt6.QtWebEngineWidgets", reason="no browser: make test-browser adds one, as CI does")
    (tmp_path / "page.html").write_text(render.page(summary(*FINDING, *KNOWN, *everything().findings[0].rows)))
    asked = [sys.executable, "-c", BROWSER, str(tmp_path / "page.html"), ASK]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120)
    said = json.loads(re.findall(r"ANSWER (.*)", done.stdout)[0])
    assert said == {
        "choices": ["any verdict", "crashed", "disagree", "known"],
        "wide": True,
        "crashed": ["crashed"],
        "told": "1 of 9",
        "text": 3,
        "open": True,
    }
