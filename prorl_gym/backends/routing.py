"""Which backend a new task goes to.

Source: arXiv 2603.18815, section on routing, for `least_assigned` (a min-heap on tasks assigned since registration;
with at most some hundred backends a scan gives the same order).
"""

from collections.abc import Callable, Sequence

from prorl_gym.backends.backend import Backend

ROUTING: dict[str, Callable[[Backend], tuple[int, ...]]] = {
    "least_in_flight": lambda backend: (backend.tasks, backend.assigned),
    "least_assigned": lambda backend: (backend.assigned,),
}
"""Smallest key wins; on a tie the one registered first."""


def choose(routing: str, backends: Sequence[Backend]) -> Backend:
    """The backend for the next task; `backends` is in order of registration and not empty."""
    return min(backends, key=ROUTING[routing])
