"""A run as it happens, for people: `offbeat watch`, a page in a browser or a view in a terminal.

gathering.py makes summaries of events, following.py feeds it from a run's folder, serving.py gives
them to browsers, text.py shows them in a terminal. Nothing here imports torch.
"""
