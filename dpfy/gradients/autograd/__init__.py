"""What a step did, read from its autograd graph: reports of layers, batch axes, uses of parameters
that no layer rule explains, views that tie parameters.
"""
