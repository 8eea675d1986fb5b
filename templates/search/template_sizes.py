"""How many nodes the templates of a job may have, and how many of its nodes can work at all.

Source: Oobleck (SOSP'23), section 4.1: with templates for consecutive sizes from n0 up, every number of nodes from
(f + 1) n0 on is a sum of template sizes.
"""

from __future__ import annotations

from resilient.errors import ArgumentError
from resilient.templates.common.words import counted
from resilient.templates.plan import PlanningProblem
from resilient.templates.template import TemplateSet


class TooFewNodes(ArgumentError):  # noqa: N818
    """Fewer nodes are live than f + 1 pipelines of n0 nodes take; wait for ``needed - live`` nodes, or stop.

    Args:
        live: Live nodes.
        max_failures: f.
        min_pipeline_nodes: n0, the nodes of the smallest template.
    """

    def __init__(self, live: int, max_failures: int, min_pipeline_nodes: int) -> None:
        self.live = live
        self.needed = (max_failures + 1) * min_pipeline_nodes
        missing = self.needed - live
        reason = f"{{max_failures}} + 1 = {counted(max_failures + 1, 'pipeline')}" if max_failures else "a pipeline"
        super().__init__(
            "the number of nodes",
            f"be at least {self.needed} ({reason} of {counted(min_pipeline_nodes, 'node')}, the fewest that hold the "
            f"model)",
            live,
            f"add {counted(missing, 'node')}",
        )


def node_counts(num_nodes: int, max_failures: int, min_pipeline_nodes: int) -> range:
    """Return the template sizes for a job: n0 .. N - f n0, the largest that leaves room for f smallest pipelines.

    Args:
        num_nodes: N, the most nodes the templates are to serve.
        max_failures: f.
        min_pipeline_nodes: n0, the fewest nodes that hold the model.

    Raises:
        TooFewNodes: N < (f + 1) n0.
    """
    if num_nodes < (max_failures + 1) * min_pipeline_nodes:
        raise TooFewNodes(num_nodes, max_failures, min_pipeline_nodes)
    return range(min_pipeline_nodes, num_nodes - max_failures * min_pipeline_nodes + 1)


def usable_nodes(problem: PlanningProblem, templates: TemplateSet, num_nodes: int) -> int:
    """Return how many of ``num_nodes`` nodes a plan can use; the others stand by.

    The largest number that is a sum of at least f + 1 and at most ``num_microbatches`` template sizes, of one size
    alone, or of those that pipelines may have beside others (:attr:`TemplateSet.sizes_beside`). These are
    consecutive, so k pipelines take any number of nodes from k times the smallest size to k times the largest; of all
    that fit, the most pipelines reach furthest.

    Args:
        problem: The job.
        templates: Its templates.
        num_nodes: The nodes there are.

    Raises:
        TooFewNodes: Not even f + 1 of the smallest templates fit.
    """
    smallest, largest = templates.sizes[0], templates.sizes[-1]
    if num_nodes < (problem.max_failures + 1) * smallest:
        raise TooFewNodes(num_nodes, problem.max_failures, smallest)
    return min(num_nodes, templates.most_pipelines(num_nodes, problem.num_microbatches) * largest)
