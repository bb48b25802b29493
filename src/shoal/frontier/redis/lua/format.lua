-- The format of the stored data, if there is any.

return call('HGET', PREFIX .. 'store', 'format')
