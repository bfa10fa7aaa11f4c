"""Network namespaces that stand for hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from contextlib import ExitStack

from weft.cli.up.ports import free_ports


class Network:
    """Addresses of hosts, and commands in front of a host's own: namespaces with a bridge where
    the machine allows them, else loopback.
    """

    def __init__(self, count: int, stack: ExitStack) -> None:
        self.name = uuid.uuid4().hex[:6]
        self.has_namespaces = True
        self.has_namespaces = self._try(count, stack)
        (self.port,) = free_ports("127.0.0.1", 1)

    @property
    def of_tests(self) -> str:
        """Address of the test's own process, outside of all namespaces."""
        return "10.213.77.254" if self.has_namespaces else "127.0.0.1"

    def address(self, host: int) -> str:
        return f"10.213.77.{host + 1}" if self.has_namespaces else "127.0.0.1"

    def before(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self._host(host)] if self.has_namespaces else []

    def cut(self, host: int) -> None:
        """Takes a host from the network: nothing arrives any more, and nobody is told."""
        self._ip("netns", "exec", self._host(host), "ip", "link", "set", "eth0", "down")

    def _host(self, host: int) -> str:
        return f"weft-{self.name}-{host}"

    def _try(self, count: int, stack: ExitStack) -> bool:
        if shutil.which("ip") is None or os.geteuid() != 0:
            return False
        bridge = f"wb{self.name}"
        try:
            self._ip("link", "add", bridge, "type", "bridge")
            stack.callback(self._ip, "link", "del", bridge)
            self._ip("link", "set", bridge, "up")
            self._ip("addr", "add", f"{self.of_tests}/24", "dev", bridge)
            for host in range(count):
                space, end = self._host(host), f"wv{self.name}{host}"
                self._ip("netns", "add", space)
                stack.callback(self._ip, "netns", "del", space)
                self._ip("link", "add", end, "type", "veth", "peer", "eth0", "netns", space)
                self._ip("link", "set", end, "master", bridge, "up")
                inside = ("netns", "exec", space, "ip")
                self._ip(*inside, "addr", "add", f"10.213.77.{host + 1}/24", "dev", "eth0")
                self._ip(*inside, "link", "set", "eth0", "up")
                self._ip(*inside, "link", "set", "lo", "up")
        except (OSError, subprocess.SubprocessError):
            stack.close()
            return False
        return True

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)
