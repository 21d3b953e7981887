from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
from pathlib import Path

from torture import damage, disks, hostile, kills, machine, together
from torture.processes import preload
from torture.stage import Stage, has_transformers, set_up
from torture.tally import Tally

# Bars of other libraries, and a warning about semaphores of processes that were killed, would hide the figures.
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
}
# What runs after the kills, and how many cases that is, about. Kills may take some of the time, the others the rest.
PARTS = {
    "two processes": (together.torture, together.CASES),
    "hostile": (hostile.torture, hostile.CASES),
    "damage": (damage.torture, damage.CASES),
    "disks": (disks.torture, disks.CASES),
    "machine": (machine.torture, machine.CASES),
}


def main() -> int:
    asked = options()
    planned = sum(cases for name, (_, cases) in PARTS.items() if name in asked.only)
    tally = Tally(asked.seed, planned + asked.kills * ("kills" in asked.only), asked.minutes)
    root = Path(tempfile.mkdtemp(prefix="spanformer-torture-"))
    os.environ |= QUIET
    stage = Stage(root, tally, random.Random(asked.seed), has_transformers())
    preload(stage.hf)
    set_up(stage)
    if "kills" in asked.only:
        kills.torture(stage, asked.kills)
    for name, (torture, _) in PARTS.items():
        if name in asked.only and not tally.late():
            torture(stage)
    print(tally.text())
    tally.write(asked.out)
    print(f"figures: {asked.out}")
    if tally.failures:
        print(f"folders of the failed cases: {root}")
        return 1
    shutil.rmtree(root)
    return 0


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m torture", description="Break things on purpose, and see them hold."
    )
    parser.add_argument("--kills", type=int, default=100, help="how many processes to kill")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn; moments still differ between runs")
    parser.add_argument("--minutes", type=float, default=13.0, help="begin nothing after this time")
    parser.add_argument("--only", choices=["kills", *PARTS], nargs="+", default=["kills", *PARTS], help="parts to run")
    parser.add_argument("--out", type=Path, default=Path("build/torture.json"), help="file for the figures")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
