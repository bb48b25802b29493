"""Tests that a crawl loses and repeats nothing when its store is rewound, responses are lost, or the clock of the
server steps. They compare the log of the site with the outputs, and do not trust the counters of the run."""
