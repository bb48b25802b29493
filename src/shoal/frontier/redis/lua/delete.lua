-- Forget a run: its name and most of its keys. What may be many is left to sweep.lua, for which the run is remembered
-- until that is done.

call('HSET', PREFIX .. 'deleted', own.number, own.name)
call('HDEL', PREFIX .. 'runs', own.name)
local parts = {
  '', ':req', ':role', ':items', ':event', ':dead', ':kinds', ':waiting', ':open', ':later', ':full', ':slot', ':sent',
  ':role_slot', ':fence', ':rewinds', ':stages',
}
for _, entry in ipairs(call('LRANGE', STAGES, 0, -1)) do call('UNLINK', stage_key((read(STAGE, entry)))) end
for _, part in ipairs(parts) do call('UNLINK', own.key .. part) end
return 1
