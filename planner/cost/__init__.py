"""The cost model: memory and time of a training configuration, from a traced (or closed-form) model and the machine's
rates. Importing it loads no torch."""
