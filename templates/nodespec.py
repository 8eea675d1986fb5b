"""How many nodes the templates of a job may have, and how many of its nodes can work at all.

Source: Oobleck (SOSP'23), section 4.1: with templates for consecutive sizes from n0 up, every number of nodes from
(f + 1) n0 on is a sum of template sizes.
"""

from __future__ import annotations

from resilient.templates.plan import Problem


class TooFewNodes(ValueError):  # noqa: N818
    """Fewer nodes are live than f + 1 pipelines of n0 nodes take; wait for ``needed - live`` nodes, or stop.

    Args:
        live: Live nodes.
        max_failures: f.
        min_pipeline_nodes: n0.
    """

    def __init__(self, live: int, max_failures: int, min_pipeline_nodes: int) -> None:
        self.live = live
        self.needed = (max_failures + 1) * min_pipeline_nodes
        missing = self.needed - live
        super().__init__(
            f"the number of nodes must be at least {self.needed} ({max_failures + 1} pipelines of "
            f"{min_pipeline_nodes}: max_failures {max_failures}, min_pipeline_nodes {min_pipeline_nodes}), "
            f"got {live}; add {missing} node{'s' if missing > 1 else ''}"
        )


def node_counts(num_nodes: int, max_failures: int, min_pipeline_nodes: int) -> range:
    """Return the template sizes for a job: n0 .. N - f n0, the largest that leaves room for f smallest pipelines.

    Args:
        num_nodes: N, the most nodes the templates are to serve.
        max_failures: f.
        min_pipeline_nodes: n0.

    Raises:
        TooFewNodes: N < (f + 1) n0.
    """
    if num_nodes < (max_failures + 1) * min_pipeline_nodes:
        raise TooFewNodes(num_nodes, max_failures, min_pipeline_nodes)
    return range(min_pipeline_nodes, num_nodes - max_failures * min_pipeline_nodes + 1)


def template_sizes(problem: Problem, num_nodes: int) -> range:
    """Return :func:`node_counts` less the sizes that have more devices than the model has layers.

    Raises:
        TooFewNodes: ``num_nodes < problem.min_nodes``.
    """
    sizes = node_counts(num_nodes, problem.max_failures, problem.min_pipeline_nodes)
    return range(sizes.start, min(sizes.stop, problem.max_pipeline_nodes + 1))


def usable_nodes(problem: Problem, num_nodes: int) -> int:
    """Return how many of ``num_nodes`` nodes a plan can use; the others stand by.

    All of them, except where a pipeline cannot have as many stages as the nodes would give it, or where there would
    be more pipelines than microbatches.

    Raises:
        TooFewNodes: ``num_nodes < problem.min_nodes``.
    """
    sizes = template_sizes(problem, num_nodes)
    smallest, largest = sizes.start, sizes.stop - 1
    most_pipelines = min(problem.num_microbatches, num_nodes // smallest)
    return max(min(num_nodes, count * largest) for count in range(problem.max_failures + 1, most_pipelines + 1))
