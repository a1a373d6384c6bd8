"""A service of a command's own: a child process on a free port of loopback, gone when the command is."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from prorl_gym.commands.child import ChildProcess
from prorl_gym.config.models import ProrlConfig

START_TIMEOUT_S = 900.0
"""The first start of a machine builds the tool environment."""


class ScratchFolder:
    """A temporary folder that stays when the block is left by an error, for its logs; a context manager.

    Attributes:
        path: Where it is.
        keep: Stay after a block without an error too.
    """

    path: Path
    keep: bool = False

    def __enter__(self) -> Self:
        """Make it."""
        self.path = Path(tempfile.mkdtemp(prefix="prorl_gym-"))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove it, unless an error (an interrupt is none) points into it."""
        if not self.keep and (exc_type is None or not issubclass(exc_type, Exception)):
            shutil.rmtree(self.path, ignore_errors=True)


class OwnService:
    """The child; a context manager. Its log lies in `folder`.

    Args:
        overrides: As for `serve`; the port is always a free one.
        config: What they compose to, already validated.
        folder: For its log and its address.
    """

    def __init__(self, overrides: Sequence[str], config: ProrlConfig, folder: Path) -> None:
        self._address_file = folder / "service.address"
        address_file = str(self._address_file).replace('"', '\\"')
        arguments = [*overrides, "server.port=0", f'server.address_file="{address_file}"']
        self.process = ChildProcess(
            "service",
            ["-m", "prorl_gym", "serve", *arguments],
            folder / "service.log",
            grace_s=config.server.shutdown_s + 5.0,
        )
        self.token = os.environ.get(config.server.token_env) if config.server.token_env else None

    def wait(self) -> str:
        """Its address, once it listens.

        Raises:
            ConfigError: It refused its configuration; in its own words.
            ProrlGymError: It did not come up.
        """
        return self.process.wait_for_address(self._address_file, START_TIMEOUT_S)

    def __enter__(self) -> Self:
        """Start it, without waiting."""
        self.process.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End it and everything it started."""
        self.process.stop()
