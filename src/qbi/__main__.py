"""`python -m qbi` is `qbi`."""

from qbi.cli import main

main()
