"""All policies' pools: several trainers share one service and never touch each other's backends."""

import asyncio

from prorl_gym.backends.pool import BackendPool
from prorl_gym.config.models import BackendConfig
from prorl_gym.errors import ConfigError, RequestError
from prorl_gym.types import LlmServer

DEFAULT_POLICY = "default"


class BackendRegistry:
    """Makes pools on demand and ends them together. Belongs to one event loop."""

    def __init__(self, config: BackendConfig) -> None:
        self._config = config
        self._pools: dict[str, BackendPool] = {}

    def pool(self, policy: str = DEFAULT_POLICY) -> BackendPool:
        """The pool of a policy; an empty one where nobody asked before."""
        if policy not in self._pools:
            self._pools[policy] = BackendPool(self._config, policy)
        return self._pools[policy]

    def servers(self) -> list[LlmServer]:
        """Every registered backend of every policy."""
        return [server for pool in self._pools.values() for server in pool.servers()]

    @property
    def calls_in_flight(self) -> int:
        """Model calls of all policies that have no answer yet."""
        return sum(pool.calls_in_flight for pool in self._pools.values())

    async def start(self) -> None:
        """Register `backend.addresses` for the policy `default`; those that do not answer are kept as unhealthy.

        Raises:
            ConfigError: An address, the dialect or the key's variable is not usable.
        """
        pool = self.pool()
        await pool.start()
        try:
            async with asyncio.TaskGroup() as group:
                for address in self._config.addresses:
                    group.create_task(pool.add(address))
        except* RequestError as errors:
            first = errors.exceptions[0]
            raise ConfigError(f"backend.{getattr(first, 'field', None) or 'addresses'}: {first}") from first

    async def stop(self) -> None:
        """Stop every pool; idempotent."""
        for pool in self._pools.values():
            await pool.stop()
