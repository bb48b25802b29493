-- The numbers of all hosts that the run has met.

return call('HKEYS', own.key .. ':lane')
