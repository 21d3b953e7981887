"""The state machine over the KV cache (support/cache_machine.py), with many more sequences than `make test` tries."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from support import cache_machine
from torture.stage import Stage

PART = "KV cache machine"
ROUNDS, EXAMPLES = 8, 25
CASES = ROUNDS


def torture(stage: Stage) -> None:
    """Rounds of sequences that no other run has tried: each round draws its own seed."""
    for _ in range(ROUNDS):
        if stage.tally.late():
            return
        number = stage.draw.randrange(1 << 30)
        machine = seed(number)(type("Machine", (cache_machine.CacheMachine,), {}))
        wrong = []
        try:
            run_state_machine_as_test(machine, settings=SETTINGS)
        except AssertionError as error:
            notes = [*map(str, getattr(error, "__notes__", ())), str(error)]
            wrong = [f"seed {number}: " + " ".join("\n".join(notes).split())]
        stage.tally.case(PART, f"{EXAMPLES} sequences of seed {number}", wrong)
    stage.tally.counts["cache operations"] = cache_machine.counted["steps"]


SETTINGS = settings(
    max_examples=EXAMPLES, stateful_step_count=30, deadline=None, database=None, print_blob=False,
    phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
)  # fmt: skip
