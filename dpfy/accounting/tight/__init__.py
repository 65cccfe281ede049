"""The tight accountant: upper and lower bounds on epsilon that agree to four digits.

An event becomes dominating pairs (`dominating_pairs`), a pair becomes a measure of privacy losses
(`losses`, `gaussian_losses`, `other_losses`) on a grid (`lattice`), and measures are composed by
convolution (`convolution`); what a ledger holds beside them is composed in `mixtures`. Callers need
`accountant` alone.
"""
