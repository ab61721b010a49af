"""`python -m parity.fixes check` was removed."""

import sys

if __name__ == "__main__":
    print("parity.fixes: `check` was removed: `parity findings --config FILE`", file=sys.stderr)
    sys.exit(2)
