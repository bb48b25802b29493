-- A worker begins: the run is treated by its options from now on. Returns the hosts whose lanes have to move because
-- the options were others before.

local before = own.options
if before == OPTIONS then return {} end
call('HSET', own.key, 'options', OPTIONS)
return before and call('HKEYS', own.key .. ':lane') or {}
