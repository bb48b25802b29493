"""Clusters as `bench/cluster` makes them: real nodes as processes, and a site that they crawl."""
