"""From configuration and row to the sandbox that one job gets. A row chooses among what configuration allows."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from prorl_gym.config.models import ProrlConfig, SandboxLimits, SandboxOverride
from prorl_gym.errors import RequestError
from prorl_gym.runtimes.base import Limits, SandboxSpec

IMAGE_COLUMNS = ("docker_image", "image")
MIB = 1 << 20


def sandbox_spec(config: ProrlConfig, override: SandboxOverride, row: Mapping[str, Any], *, job_id: str) -> SandboxSpec:
    """The runtime group, with the agent's wishes over it and the row's image over both.

    Raises:
        RequestError: The row's image is not among those that `images.allow` allows.
    """
    runtime = config.runtime
    kind = override.runtime or runtime.kind
    fakeroot = override.fakeroot
    if fakeroot is None:
        fakeroot = runtime.fakeroot or bool(override.setup and kind == "apptainer")
    return SandboxSpec(
        kind=kind,
        image=row_image(row, config.images.allow) or override.image or runtime.image,
        network=override.network or runtime.network,
        workdir=runtime.workdir,
        limits=_limits(override.limits or runtime.limits),
        disk=runtime.disk,
        fakeroot=fakeroot,
        gpu=runtime.gpu if override.gpu is None else override.gpu,
        setup_network=override.setup_network if override.setup else None,
        start_timeout_s=runtime.start_timeout_s,
        job_id=job_id,
    )


def row_image(row: Mapping[str, Any], allowed: tuple[str, ...]) -> str | None:
    """The image that a row names, if it names one.

    Raises:
        RequestError: It matches no pattern of `images.allow`, or is no text.
    """
    for column in IMAGE_COLUMNS:
        image = row.get(column)
        if image is None or image == "":
            continue
        if not isinstance(image, str):
            raise RequestError(f"{column} must be a text", field=f"instance.{column}")
        leaves = ".." in image.split("/")  # a pattern's * would match it
        if leaves or not any(fnmatchcase(image, pattern) for pattern in allowed):
            known = ", ".join(allowed) or "nothing"
            raise RequestError(
                f"image {image[:200]!r} is not allowed; images.allow has {known}", field=f"instance.{column}"
            )
        return image
    return None


def _limits(limits: SandboxLimits) -> Limits:
    return Limits(
        memory_bytes=limits.memory_mb and limits.memory_mb * MIB,
        processes=limits.processes,
        file_bytes=limits.file_mb and limits.file_mb * MIB,
        disk_bytes=limits.disk_mb and limits.disk_mb * MIB,
        output_bytes=limits.output_bytes,
    )
