-- The numbers of all runs.

return call('HVALS', PREFIX .. 'runs')
