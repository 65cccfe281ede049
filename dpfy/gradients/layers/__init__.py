"""Layer rules: how each kind of layer runs under the tape, and how it explains its output
gradient.
"""
