"""The parts of `bench/batch`: a server of the API, its callers, the sites, the workloads to compare, and the tables."""
