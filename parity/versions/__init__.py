"""Versions: run anywhere, compare two, find the release that changed something.

    environment   Environment.of(["trl==0.27.2"]).run(["python", "-m", "parity", "run"]); listing, show, prune
    releases      which releases the index has, and when each was uploaded
    search        search("trl", good=…, bad=…, check=…): the release that changed what a check finds
    spec          PKG==VER and 'PKG @ PATH'

Errors meant for users, each one line: SpecError, SearchError, and client.EnvironmentUnusable.
"""
