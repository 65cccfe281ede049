"""Synthetic text: a language model trained privately on texts, samples of it, and checks of what it
may have learnt by heart.
"""
