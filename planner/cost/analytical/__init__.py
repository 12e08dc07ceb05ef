"""The cost model of `autoplan estimate`: activations and compute come from a closed form and datasheets."""
