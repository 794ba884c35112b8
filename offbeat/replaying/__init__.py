"""A recorded run, done again: what its events say, and the same arithmetic in the same order."""
