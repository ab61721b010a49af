"""`python -m parity.fixes check FILE`."""

import sys

from parity.tools.settings_check import main

if __name__ == "__main__":
    sys.exit(main())
