"""Engines start the roles of a job; whichever one does, the roles are the same."""
