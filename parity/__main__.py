"""The command `parity`, and `python -m parity`."""

import importlib.util
import os
import sys

NEEDED = "torch click rich msgspec hypothesis jinja2 numpy packaging psutil safetensors yaml".split()
"""Modules of the extra `cli`; the judge alone, `parity.testing`, needs none of them."""


def main() -> None:
    """The command, or one line that says how to install it, and exit code 2."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        command = "pip install 'llm-parity[cli]' (with TRL and its kind: 'llm-parity[harness]')"
        print(
            f"parity: {', '.join(missing)} not installed; the command needs more than the judge: {command}",
            file=sys.stderr,
        )
        sys.exit(2)
    from parity.cli.commands import main

    main()


if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
        sys.path.append(sys.path.pop(0))  # a folder trl/ where the user stands is not the installed trl
    main()
