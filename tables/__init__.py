"""One table of chips, one of model families; standard library only."""
