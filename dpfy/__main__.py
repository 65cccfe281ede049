"""`python -m dpfy` is `dpfy`."""

from dpfy.cli.app import main

main()
