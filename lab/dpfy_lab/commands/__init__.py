"""The verbs that dpfy-lab adds to the command line."""
