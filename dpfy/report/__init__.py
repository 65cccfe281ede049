"""The privacy card of a run, and its verification."""
