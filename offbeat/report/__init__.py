"""Reports of runs: record.py reads events, groups.py sorts runs, statistics.py compares them.
document.py is what a report consists of, one_run.py and many_runs.py fill it, markdown.py and
page.py write it down."""
