-- Note that cookies of the run have changed. Returns their new version, which each lease answers with.

return call('INCR', own.key .. ':cookies')
