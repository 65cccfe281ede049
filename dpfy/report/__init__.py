"""The privacy report of a run, and its verification."""
