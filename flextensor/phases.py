"""The life cycle of an offloaded model: discovery -> profiling -> inference, then released."""

from __future__ import annotations

DISCOVERY, PROFILING, INFERENCE, RELEASED = "discovery", "profiling", "inference", "released"
