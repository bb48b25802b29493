-- The view, or nothing if there is no such cluster.

return call('EXISTS', HEAD) == 1 and view()
