"""The clusters of `bench/cluster`: real nodes as processes, and a site that they crawl."""
