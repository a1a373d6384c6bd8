"""The trainer's side: httpx and pydantic only."""

from prorl_gym.client.replies import CancelReport, Environments, JobEvent, ServiceState
from prorl_gym.client.rollout_client import RolloutClient

__all__ = ["CancelReport", "Environments", "JobEvent", "RolloutClient", "ServiceState"]
