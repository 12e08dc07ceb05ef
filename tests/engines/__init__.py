"""Searches on engines that others made: each test here needs a real one, `make test-engines` runs them."""
