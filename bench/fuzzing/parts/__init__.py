"""Each module is one part of `bench/fuzz`; see `fuzzing.part`."""
