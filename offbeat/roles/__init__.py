"""What a process or thread of a run does: server, worker, master, evaluator."""
