"""Tests that judge from outside whether a crawl loses or repeats anything: the store goes back in time, answers get lost,
the server's clock steps. The judge is the site's own log and the lines in the outputs, never the ledger of the run."""
