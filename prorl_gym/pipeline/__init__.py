"""Jobs, stages, timers, cancel, shutdown."""

from prorl_gym.pipeline.events import Event, EventLog
from prorl_gym.pipeline.outcome import Outcome
from prorl_gym.pipeline.pipeline import CancelReport, Pipeline, Snapshot
from prorl_gym.pipeline.ticket import Ticket

__all__ = ["CancelReport", "Event", "EventLog", "Outcome", "Pipeline", "Snapshot", "Ticket"]
