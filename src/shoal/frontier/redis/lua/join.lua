-- A worker begins: the run is treated by its options from now on. Returns 1 if its lanes have to move because the options
-- were others before.

local before = own.options
if before == OPTIONS then return 0 end
call('HSET', own.key, 'options', OPTIONS)
return before and 1 or 0
