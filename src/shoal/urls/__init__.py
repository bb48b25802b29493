"""URLs: normalization, links already seen, and scope."""
