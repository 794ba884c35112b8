"""Reports of runs: record.py reads events, statistics.py compares, document.py is what a report
consists of, one_run.py and many_runs.py fill it, markdown.py and page.py write it down."""
