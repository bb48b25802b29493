"""Tests that judge from outside whether a crawl loses or repeats anything: when the store goes back in time, when
answers get lost, when the server's clock steps. The judge is the site's log and the outputs, never the run's ledger."""
