"""Recipes: what to train, as opposed to how. base.py says what one is; the others are built in."""
