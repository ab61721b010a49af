"""Without the extra `cli` the judge works, and the command says what it needs."""

import subprocess
import sys

HIDDEN = """
import importlib.util, sys
sys.argv = ["parity", "run"]
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("click", "hypothesis") else find(name, *rest)
import parity.testing
from parity.__main__ import main
main()
"""


def test_the_command_names_the_line_that_installs_it():
    done = subprocess.run([sys.executable, "-c", HIDDEN], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("parity: click, hypothesis not installed")
    assert "pip install 'llm-parity[cli]' (with TRL" in done.stderr and not done.stdout
