"""One run: its job, its folder and all that is kept in there, and what a person sees of it."""
