"""Private answers by rules for research, and voters that go with them."""
