"""The space of a search: which configurations are legal, and which of them are worth a trial."""
