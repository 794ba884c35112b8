"""Runs that span machines: who is where, and roles that were started by hand there."""
