"""The zoo: small trainings of many kinds, written as their users would write them, that autoplan has to plan."""
