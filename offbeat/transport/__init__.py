"""How headers and payloads travel between a worker and a server; base.py is the contract."""
