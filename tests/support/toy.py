"""Recipes that every process, and every role in this one, finds by name: toy:recipe."""

from helpers import toy_recipe

from offbeat import SGD, cosine

recipe = toy_recipe(epochs=15)
short = toy_recipe(epochs=5)
scheduled = toy_recipe(epochs=15, optimizer=SGD(lr=0.1), schedule=cosine(), ema=0.9)
diverging = toy_recipe(epochs=15, optimizer=SGD(lr=1e4, weight_decay=1.0))
