"""Mechanisms that no release of dpfy needs: each draws exact noise and has its proof beside the code."""
