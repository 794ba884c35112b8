"""`offbeat bench`: what things cost.

Every figure stands beside something that was measured in the same run, in turn with it, since the
same machine may be twice as fast an hour later:

    exchange   gradient up, update, parameters back, beside two plain copies of the same size
    train      each discipline, beside the ceiling (the same workers, who exchange with nobody) and
               beside torch's DistributedDataParallel on gloo
    peers      each discipline, beside DDP, Hogwild, torch's RPC and Ray's actors
    launch     a script's own loop, beside the same as a recipe
    durable    --ack durable, beside --ack applied, and one sync of the same disk
    engines    roles that Ray starts, beside those that the command starts
    gpu        workers that share a GPU, beside bare loops
    norm       a step with the fast local response normalisation, beside one with torch's
    network    payloads there and back, over this transport and others
    report     a report about many runs, beside parsing their events
    start      from the command until everybody is at work; forked roles beside started ones
    links      training over slow networks, and what helps, beside training over loopback

Each is a function that returns the rows of a table (tables.py); `links`, whose grid takes hours,
keeps its cells in a folder and returns the lines of several (link_tables.py). The flags are in
cli/flags.py.
"""
