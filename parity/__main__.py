"""`python -m parity`: the same as the command `parity`."""

from parity.cli.commands import main

if __name__ == "__main__":
    main()
