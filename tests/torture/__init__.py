"""Fault tests for any machine: kills, full disks, damaged files, two processes, hostile folders.

    make torture                                         # all of it, at most 15 minutes
    PYTHONPATH=tests python -m torture --kills 15        # less of it, from a clone

docs/reliability.md says what is promised; what breaks a promise ends the run with exit code 1 and the seed to see it
again.
"""
