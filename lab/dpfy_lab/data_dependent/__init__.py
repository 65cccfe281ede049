"""Data-dependent accounting for PATE: what answers told about the votes at hand."""
