"""A model checker of the membership machine: independent workers, nodes and links around it, and what must hold.

    python -m tests.agent.membership.checker --seeds 100000          # look for faults
    python -m tests.agent.membership.checker --start 4711            # one history again, in full
    python -m tests.agent.membership.checker.mutants                 # would it have told?

The machine is the real one; all around it is modelled on ``docs/architecture.md``, not on the workers' code. One seed
is one history: the same always.

    lineage.py      what a copy of a state has gone through; files, manifests
    jobs.py         which jobs there are
    fabric.py       what the workers of one generation exchange: copies, sums, the barrier
    worker.py       a worker: what it holds, and where it is in a step
    recovery.py     what a worker does with the coordinator's messages
    nodes.py        nodes with their agents, and the links to the coordinator
    world.py        all of it, the clock, and what the coordinator does around its machine
    succession.py   the coordinator dies, another one inherits
    faults/         what can go wrong, when it is worst, and of what a seed has more than others
    truth.py        what is so, whatever the machine believes
    promises.py     what must hold of all that the machine decides
    history.py      one seed, from its beginning to its end
    mutants/        mistakes that are made in a copy of the package: does the checker tell?
"""
