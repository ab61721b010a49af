"""`python -m parity.fixes check FILE`: exit code 1 where something known is wrong for its settings, 0 where not, 2 for misuse."""

import argparse
import sys

from parity.errors import UsageError
from parity.tools.advice.advise import check


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m parity.fixes", description="Known findings that settings meet.")
    command = parser.add_subparsers(required=True).add_parser(
        "check", help="read a file, change nothing, execute nothing"
    )
    command.add_argument("file", help="config.yaml, args.json or script.py")
    command.add_argument("--trainer", help="the trainer class, where the file does not say: GRPOTrainer")
    given = parser.parse_args()
    try:
        found = check(given.file, given.trainer)
    except UsageError as error:
        print(f"parity.fixes: {error}", file=sys.stderr)
        return 2
    print(*found, sep="\n\n")
    return int(any(found))
