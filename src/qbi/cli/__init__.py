"""The command line: one thin module a command."""

import sys

from qbi.errors import QbiError


def main() -> None:
    """Run `qbi`; what the user can mend becomes one sentence and exit code 2."""
    from qbi.cli.app import app

    try:
        app()
    except QbiError as problem:
        sys.stderr.write(f"qbi: {problem}\n")
        raise SystemExit(2) from None
