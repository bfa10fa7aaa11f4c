"""Metrics of images and audio, read when scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from weft.checkpoint.audio_config import SAMPLE_RATE
from weft.gateway.media.clips import ClipReader
from weft.gateway.media.reader import MediaReader


class MediaCollector(Collector):
    """Images, what they wait for and what they take."""

    def __init__(self, reader: MediaReader, clips: ClipReader) -> None:
        self._reader, self._clips = reader, clips

    def collect(self) -> Iterator[Metric]:
        """The endpoint's thread calls this."""
        reader, pools = self._reader, (self._reader.pool, self._reader.videos)
        images = CounterMetricFamily(
            "weft_images", "Images of requests, by source: memo, decoded.", labels=["source"]
        )
        images.add_metric(["memo"], reader.num_repeated)
        images.add_metric(["decoded"], reader.num_images - reader.num_repeated)
        losses = CounterMetricFamily(
            "weft_media_process_losses",
            "Media processes that were replaced, by reason: timeout, crash.",
            labels=["reason"],
        )
        for reason in pools[0].num_failures:
            losses.add_metric([reason], sum(pool.num_failures[reason] for pool in pools))
        fetches = CounterMetricFamily(
            "weft_media_fetches",
            "Fetches of images by URL, by outcome: ok, forbidden, failed.",
            labels=["outcome"],
        )
        ended = {} if reader.fetcher is None else reader.fetcher.num_fetches
        for outcome in ("ok", "forbidden", "failed"):
            fetches.add_metric([outcome], ended.get(outcome, 0))
        jobs = GaugeMetricFamily(
            "weft_media_jobs", "Images in media processes and before them.", labels=["state"]
        )
        jobs.add_metric(["running"], sum(pool.num_running for pool in pools))
        jobs.add_metric(["queued"], sum(pool.num_queued for pool in pools))
        memory = GaugeMetricFamily(
            "weft_media_bytes", "Processed images in memory, by holder.", labels=["holder"]
        )
        memory.add_metric(["memo"], reader.memo.num_bytes)
        memory.add_metric(["requests"], reader.held.num_bytes)
        seconds = CounterMetricFamily(
            "weft_audio_seconds", "Audio that was decoded for requests, in seconds."
        )
        seconds.add_metric([], (self._clips.num_samples + reader.heard.num_samples) / SAMPLE_RATE)
        files = CounterMetricFamily("weft_audio_files", "Files of audio that were decoded.")
        files.add_metric([], self._clips.num_files + reader.heard.num_files)
        parts = CounterMetricFamily("weft_audio_clips", "Clips that were made of them.")
        parts.add_metric([], self._clips.num_clips + reader.heard.num_clips)
        yield from (images, fetches, losses, jobs, memory, files, seconds, parts)
