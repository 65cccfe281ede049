"""What keeps a run what its plan says: nobody else moves weights, no noise meets two sums, and a
resumed run makes the same bits.
"""
