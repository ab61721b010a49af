"""`python -m parity`: the same as the command `parity`."""

import os
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
        sys.path.append(sys.path.pop(0))  # a folder trl/ where the user stands is not the installed trl

    from parity.cli.commands import main

    main()
