"""Flower's PyTorch quickstart pattern, private by dpfy."""
