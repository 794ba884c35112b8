"""The version, where neither `offbeat --version` nor the build has to import torch for it."""

__version__ = "0.1.0"
