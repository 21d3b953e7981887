"""Synthetic tasks: texts of which only the answers count, one file a task, which `registry.py` lists; and `facts`, a
stream in which every token counts."""

from spanformer.data.tasks.base import DistanceTask, Task
from spanformer.data.tasks.facts import Facts
from spanformer.data.tasks.registry import TASKS, parse_facts, parse_task, write, written
from spanformer.data.tasks.stream import TaskStream, texts_of

__all__ = [
    "TASKS",
    "DistanceTask",
    "Facts",
    "Task",
    "TaskStream",
    "parse_facts",
    "parse_task",
    "texts_of",
    "write",
    "written",
]
