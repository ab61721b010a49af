"""The scripts of findings in trainers that have no check: each shows what the page of them says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((ROOT / "cases/scripts/trainers").glob("*-*.py"))
PAGE = (ROOT / "docs/measured/trainers-unchecked.md").read_text()


def run(*words):
    paths = [ROOT, ROOT / "cases/scripts", ROOT / "cases/scripts/trainers"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, env=env)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_shows_its_finding(script):
    done = run(script)
    if done.returncode == 2 and "vLLM is not installed" in done.stdout:
        pytest.skip("vLLM is not installed")
    assert done.returncode == 1 and "\n|---|" in done.stdout, done.stdout + done.stderr[-2000:]


def test_the_page_names_every_script():
    assert [script.stem for script in SCRIPTS if script.stem not in PAGE] == []
