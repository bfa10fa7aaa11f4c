"""Network namespaces that stand for hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from contextlib import ExitStack
from pathlib import Path

from weft.cli.up.ports import free_ports


class Network:
    """Addresses of hosts, and commands in front of a host's own: namespaces with a bridge where
    the machine allows them, else loopback.
    """

    def __init__(self, count: int, stack: ExitStack) -> None:
        self.name = uuid.uuid4().hex[:6]
        # Networks of programs that run at once must differ.
        self._prefix = f"10.{64 + int(self.name[:2], 16) % 128}.{int(self.name[2:4], 16)}"
        self.has_namespaces = True
        self.has_namespaces = self._try(count, stack)
        (self.port,) = free_ports("127.0.0.1", 1)

    @property
    def of_tests(self) -> str:
        """Address of the test's own process, outside of all namespaces."""
        return f"{self._prefix}.254" if self.has_namespaces else "127.0.0.1"

    @property
    def device_of_tests(self) -> str:
        """Network device of the test's own process."""
        return f"wb{self.name}" if self.has_namespaces else "lo"

    def address(self, host: int) -> str:
        return f"{self._prefix}.{host + 1}" if self.has_namespaces else "127.0.0.1"

    def before(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self._host(host)] if self.has_namespaces else []

    def cut(self, host: int) -> None:
        """Takes a host from the network: nothing arrives any more, and nobody is told."""
        self._ip("netns", "exec", self._host(host), "ip", "link", "set", "eth0", "down")

    def uncut(self, host: int) -> None:
        """Connects a host again that `cut` took from the network."""
        self._ip("netns", "exec", self._host(host), "ip", "link", "set", "eth0", "up")

    def shape(self, host: int, bits_per_s: float) -> bool:
        """Bounds the rate at which a host sends. False: the machine allows no namespaces, or its
        kernel has no token buckets.
        """
        if not self.has_namespaces:
            return False
        bucket = ["rate", f"{bits_per_s:.0f}", "burst", f"{max(1 << 16, bits_per_s / 8e3):.0f}"]
        device = ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *bucket]
        try:
            self._run(*self.before(host), *device, "latency", "100ms")
        except (OSError, subprocess.SubprocessError):
            return False
        return True

    def unshape(self, host: int) -> None:
        """Takes the bound off again."""
        self._run(*self.before(host), "tc", "qdisc", "del", "dev", "eth0", "root")

    def num_sent(self, host: int) -> int:
        """Bytes that a host has sent so far, headers of all protocols among them."""
        return self._counted(host, "rx_bytes")

    def num_received(self, host: int) -> int:
        """Bytes that a host has received so far, headers of all protocols among them."""
        return self._counted(host, "tx_bytes")

    def _counted(self, host: int, name: str) -> int:
        return int(Path(f"/sys/class/net/{self._end(host)}/statistics/{name}").read_text())

    def _host(self, host: int) -> str:
        return f"weft-{self.name}-{host}"

    def _end(self, host: int) -> str:
        return f"wv{self.name}{host}"

    def _try(self, count: int, stack: ExitStack) -> bool:
        if shutil.which("ip") is None or os.geteuid() != 0:
            return False
        bridge = self.device_of_tests
        try:
            self._ip("link", "add", bridge, "type", "bridge")
            stack.callback(self._ip, "link", "del", bridge)
            self._ip("link", "set", bridge, "up")
            self._ip("addr", "add", f"{self.of_tests}/24", "dev", bridge)
            for host in range(count):
                space, end = self._host(host), self._end(host)
                self._ip("netns", "add", space)
                stack.callback(self._ip, "netns", "del", space)
                self._ip("link", "add", end, "type", "veth", "peer", "eth0", "netns", space)
                self._ip("link", "set", end, "master", bridge, "up")
                inside = ("netns", "exec", space, "ip")
                self._ip(*inside, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
                self._ip(*inside, "link", "set", "eth0", "up")
                self._ip(*inside, "link", "set", "lo", "up")
        except (OSError, subprocess.SubprocessError):
            stack.close()
            return False
        return True

    def _ip(self, *words: str) -> None:
        self._run("ip", *words)

    @staticmethod
    def _run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, timeout=10)
