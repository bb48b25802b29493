-- The format of what is stored, if anything is.

return call('HGET', PREFIX .. 'store', 'format')
