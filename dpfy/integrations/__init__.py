"""The loops people already have. Thin adapters to the private loop; each tool is imported only by
the file that needs it.
"""
