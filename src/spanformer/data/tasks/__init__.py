"""Synthetic tasks: texts of which only the answers count. One file a task; `registry.py` lists them."""

from spanformer.data.tasks.base import DistanceTask, Task
from spanformer.data.tasks.registry import TASKS, parse_task, write, written
from spanformer.data.tasks.stream import TaskStream, texts_of

__all__ = ["TASKS", "DistanceTask", "Task", "TaskStream", "parse_task", "texts_of", "write", "written"]
