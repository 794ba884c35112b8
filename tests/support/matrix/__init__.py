"""What may go wrong, row by row: how it is done, what must hold, and how often it was tried.

`scripts/faults.py` runs rows at full count and writes their table; the ordinary tests run each of
them a few times.
"""
