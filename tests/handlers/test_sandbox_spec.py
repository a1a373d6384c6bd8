"""From configuration and row to one job's sandbox."""

import pytest

from prorl_gym.config.models import PathsConfig, ProrlConfig, RuntimeConfig, SandboxOverride
from prorl_gym.handlers.sandbox_spec import sandbox_spec
from prorl_gym.runtimes.base import SandboxSpec


def spec_of(tmp_path, runtime: dict, override: dict) -> SandboxSpec:
    config = ProrlConfig(
        paths=PathsConfig(state=tmp_path, images=tmp_path), runtime=RuntimeConfig.model_validate(runtime)
    )
    return sandbox_spec(config, SandboxOverride.model_validate(override), {}, job_id="j")


@pytest.mark.parametrize(
    ("runtime", "override", "fakeroot"),
    [
        ({"kind": "apptainer"}, {}, False),
        ({"kind": "apptainer"}, {"setup": ["apt-get install -y git"]}, True),
        ({"kind": "apptainer"}, {"setup": ["true"], "fakeroot": False}, False),
        ({"kind": "apptainer", "fakeroot": True}, {}, True),
        ({"kind": "apptainer", "fakeroot": True}, {"fakeroot": False}, False),
        ({"kind": "bubblewrap"}, {"setup": ["true"]}, False),
        ({"kind": "bubblewrap"}, {"runtime": "apptainer", "setup": ["true"]}, True),
    ],
)
def test_what_setup_installs_is_roots_in_apptainer(tmp_path, runtime, override, fakeroot):
    assert spec_of(tmp_path, runtime, override).fakeroot is fakeroot


def test_an_agent_without_setup_has_no_setup_network(tmp_path):
    assert spec_of(tmp_path, {}, {"setup_network": "host"}).setup_network is None
    assert spec_of(tmp_path, {}, {"setup_network": "host", "setup": ["true"]}).setup_network == "host"


def test_an_agents_gpu_goes_before_the_groups(tmp_path):
    assert spec_of(tmp_path, {"kind": "apptainer", "gpu": True}, {}).gpu
    assert not spec_of(tmp_path, {"kind": "apptainer", "gpu": True}, {"gpu": False}).gpu
