"""The parts of `bench/batch`: a server of the API, its callers, the sites, what it is compared with, and the tables."""
