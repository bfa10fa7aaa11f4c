"""Latency targets: what a request would get as things are, and whether it is taken."""

from __future__ import annotations

from weft.gateway.slo.gate import Ask, LatencyGate
from weft.gateway.slo.outlook import Forecast, Outlook
from weft.gateway.slo.targets import NO_TARGETS, Targets

__all__ = ["NO_TARGETS", "Ask", "Forecast", "LatencyGate", "Outlook", "Targets"]
