"""Servers, a workload, its clock and tables, for `bench/queue`, `bench/fleet` and `bench/fleet-growth`."""
