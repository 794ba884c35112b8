"""People's own training loops: `optimizer = offbeat.distribute(model, optimizer)` in a script, and
`offbeat launch train.py` to start it.

The script runs in as many processes as there are workers; its optimizer's `step()` is an exchange
with the servers. What they keep is known when rank 0's script comes to its first step: it writes
down a description (description.py), for which servers and other ranks wait. process.py is what
becomes of a role's process, running.py runs the script in it, distribute.py is what the script
calls, and launching.py what starts it all.
"""
