"""`offbeat compare`: grid.py says what is compared, runs.py runs it, cell by cell."""
