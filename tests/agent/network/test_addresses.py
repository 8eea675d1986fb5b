"""An address that means another machine on every machine is refused, with those that do not."""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path

import pytest

from resilient.agent.launch import launch
from resilient.agent.launch_options import LaunchOptions
from resilient.agent.network.addresses import address_of, addresses_of, check_host, own_addresses

MUST = "host must be an address at which other machines reach this one, got "


def unknown(host: str) -> list[str]:
    raise socket.gaierror(-2, "Name or service not known")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "10.0.0.1", "8.8.8.8"])
def test_addresses_are_taken_as_they_are(host: str) -> None:
    check_host(host, unknown)


@pytest.mark.parametrize("found", ["127.0.0.1", "127.0.1.1", "::1"])
def test_name_that_is_loopback_here_is_refused_with_what_others_can_reach(found: str) -> None:
    fix = "give 10.0.0.7 or fd00::7, or leave host out for a job on this machine alone"
    with pytest.raises(
        ValueError, match=f"^{re.escape(f'{MUST}{chr(39)}node7{chr(39)}, which is {found} here; {fix}')}$"
    ):
        check_host("node7", lambda _: ["10.0.0.7", found], lambda: ["10.0.0.7", "fd00::7"])


def test_name_that_nobody_knows_is_refused() -> None:
    fix = "give one that others can reach, or leave host out for a job on this machine alone"
    message = f"{MUST}'node7', which cannot be resolved (Name or service not known); {fix}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_host("node7", unknown, list)


def test_name_of_an_address_that_others_reach_is_taken() -> None:
    check_host("node7", lambda _: ["10.0.0.7"])


@pytest.mark.parametrize("host", ["localhost", "no-such-name.invalid", "a..b", ""])
def test_job_that_nobody_could_join_does_not_start(host: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.touch()
    with pytest.raises(ValueError, match=f"^{re.escape(MUST + repr(host))}, which "):
        launch(LaunchOptions(script=str(script), run_directory=str(tmp_path / "run"), host=host))
    assert not (tmp_path / "run").exists()


def test_own_addresses_can_be_listened_at() -> None:
    for address in own_addresses():
        assert not ipaddress.ip_address(address).is_loopback
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family):
            assert addresses_of(address) == [address]


def test_interface_is_known_by_name_and_by_address() -> None:
    assert address_of("lo", "10.0.0.1") == address_of("127.0.0.1") == "127.0.0.1"


def test_interface_that_is_not_there_is_refused_with_those_that_are() -> None:
    told = r"^interface must be an interface of this machine, or its address, got 'ib7'; choose of .*lo \(127\.0\.0\.1"
    with pytest.raises(ValueError, match=told):
        address_of("ib7")
