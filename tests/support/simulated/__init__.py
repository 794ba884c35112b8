"""Offbeat's own roles under a virtual clock, in one thread, with everything that can go wrong.

What runs is the program: servers, sessions, ledger, disciplines, exchanges, workers, the master's
books, the supervisor, and what reads and writes checkpoints. What is made up is what they stand on:

    tasks.py       time, threads and processes, one of which runs at a time
    network.py     connections: late, cut, silent, doubled
    disk.py        a disk that loses what was not brought to it
    program.py     a tiny model that counts gradients, and the roles on top of all that
    engine.py      who starts roles, and starts them again
    faults.py      one seed's run, and what befalls it
    watching.py    what must hold after every event

    from simulated.faults import simulate
    print(simulate(17).complaints)

The same seed is the same run to the last byte, on every machine.
"""
