"""What `bench/queue`, `bench/fleet` and `bench/fleet-growth` share: servers, a workload, its clock, tables."""
