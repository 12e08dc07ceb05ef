"""The cost model of a search: activations and compute come from the traced program and the measured machine."""
