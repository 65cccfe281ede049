"""CUDA graphs: the engine's part of a step, or the whole of it, recorded once and launched
whole.
"""
