"""The self-test: seeded mistakes are switched on one at a time, and each must be caught by its check."""
