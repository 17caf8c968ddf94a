"""The execution graph: `jt.graph` runs the kernels of a function in one launch.

`regions` cuts a jaxpr, `boxes` says which part of each array programs touch, `tasks` is the graph, `schedule` predicts
its timeline, `interpret` runs it by the reference interpreter, `primitive` by one custom call.
"""

from .graphed import Graphed, GraphExplanation, graph
from .tasks import TaskGraph
from .timeline import GraphTimeline

__all__ = ["GraphExplanation", "GraphTimeline", "Graphed", "TaskGraph", "graph"]
