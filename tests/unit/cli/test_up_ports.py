"""Ports that a mesh takes for itself."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from weft.cli.up import ports
from weft.cli.up.ports import check_free, free_ports, free_run
from weft.contract.errors import ConfigError


def test_ports_are_different_and_out_of_the_way_of_connections() -> None:
    found = free_ports("127.0.0.1", 50)
    assert len(set(found)) == 50
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first > 30_000:
        assert max(found) < first


def test_ports_in_a_row_are_free() -> None:
    first = free_run("127.0.0.1", 5)
    for port in range(first, first + 5):
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


@pytest.mark.parametrize("text", ["20003 60999\n", "1024 65535\n", "", "many\n"])
def test_the_system_chooses_where_there_are_few(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    bounds = tmp_path / "range"
    bounds.write_text(text)
    monkeypatch.setattr(ports, "_LOCAL_PORTS", bounds)
    assert len(set(free_ports("127.0.0.1", 8))) == 8


def test_ports_that_another_process_has_chosen_are_not_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though nothing listens there yet."""
    choose = "from weft.cli.up.ports import free_ports; print(*free_ports('127.0.0.1', 3))"
    command = [sys.executable, "-c", f"{choose}; input()"]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        chosen = [int(port) for port in other.stdout.readline().split()]
        tried = iter(chosen)
        monkeypatch.setattr(ports, "_any_port", lambda: next(tried, 0))
        assert not set(chosen) & set(free_ports("127.0.0.1", 2))
        assert next(tried, None) is None
        other.communicate("\n")


def test_the_flag_that_helps_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another port with --grpc-port"):
            check_free("127.0.0.1", port, "--grpc-port")
    for host in ("192.0.2.1", "nowhere.invalid"):
        with pytest.raises(ConfigError, match="choose an address of this machine with --host"):
            check_free(host, port, "--grpc-port")


def test_addresses_of_other_machines_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        free_ports("192.0.2.1", 1)
