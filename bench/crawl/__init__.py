"""The parts of `bench/run`: the sites, the server, the contenders, one measured run, and the table."""
