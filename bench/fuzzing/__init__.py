"""The search for expensive inputs of `bench/fuzz`."""
