"""Datasets: readers of the official files, the built-in sample, and batches for each worker."""
