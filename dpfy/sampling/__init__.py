"""Which records take part in which step. Fields of a sampler are public; the number of records and
the generator are arguments.
"""
