"""Private statistics: counts, sums, means, quantiles, tables; each with its standard error and
interval.
"""
