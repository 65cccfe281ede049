"""Batch to bounded sum: clip rules, layer rules, engines and the model checker."""
