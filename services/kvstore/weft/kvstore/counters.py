"""Counters of the store since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counters since start; the names are those in Stats and in the metrics."""

    lookups: int = 0
    lookup_pages: int = 0
    """Keys asked for."""
    hit_pages: int = 0
    """Leading keys that were held."""
    puts: int = 0
    """Puts accepted for processing."""
    puts_refused: int = 0
    """Puts refused for lack of room, or for another page size."""
    puts_failed: int = 0
    """Puts not read in time, or cut off."""
    offered_pages: int = 0
    stored_pages: int = 0
    present_pages: int = 0
    refused_pages: int = 0
    digest_mismatches: int = 0
    bytes_in: int = 0
    corrupt_reports: int = 0
    corrupt_pages: int = 0
    """Pages whose bytes in the arena were wrong."""
    held_pages: int = 0
    """Pages kept still for workers that read them."""
    flushed_pages: int = 0
