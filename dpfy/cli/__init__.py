"""One file a verb: parse, call, print; no logic."""
