"""Features that are centred and whitened by private moments, and what the release of them promises."""
