"""Metric privacy of text: words that are replaced by near ones."""
