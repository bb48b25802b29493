-- What there is to see, or nothing if there never was such a cluster.

return call('EXISTS', HEAD) == 1 and view()
