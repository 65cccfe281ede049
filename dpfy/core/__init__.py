"""The vocabulary of dpfy: units, adjacency, participation, events, values, guarantees, the ledger.
No algorithm lives here.
"""
