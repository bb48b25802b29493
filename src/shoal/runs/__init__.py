"""Runs on a fleet: started once, worked on by any number of workers, told apart by their run_id."""

from __future__ import annotations
