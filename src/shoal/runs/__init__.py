"""Runs on a fleet: each has a run_id, is started once, and is crawled by any number of workers."""

from __future__ import annotations
