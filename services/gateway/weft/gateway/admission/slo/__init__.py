"""Latency targets: forecasts of a request's latency, and its admission."""

from __future__ import annotations

from weft.gateway.admission.slo.forecast import Forecast, LatencyForecaster
from weft.gateway.admission.slo.gate import LatencyGate, SloTicket
from weft.gateway.request import NO_TARGETS, Targets

__all__ = [
    "NO_TARGETS",
    "Forecast",
    "LatencyForecaster",
    "LatencyGate",
    "SloTicket",
    "Targets",
]
