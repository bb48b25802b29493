-- Delete a run: its name and most of its keys. Leases and queues may be many; sweep.lua deletes them in steps. Until then
-- the run is listed in `deleted`.

local listed = redis.pcall('HSET', PREFIX .. 'deleted', own.number, own.name)
if type(listed) == 'table' and listed.err then -- there is no memory: make some, for the next attempt
  for _, part in ipairs({':items', ':event', ':req'}) do call('UNLINK', own.key .. part) end
  return listed
end
call('HDEL', PREFIX .. 'runs', own.name)
local parts = {
  '', ':req', ':role', ':items', ':event', ':dead', ':kinds', ':refused', ':waiting', ':open', ':later', ':full', ':slot',
  ':sent', ':claim', ':role_slot', ':fence', ':holder', ':worker', ':beat', ':rewinds', ':stages', ':cookies',
}
for _, entry in ipairs(call('LRANGE', STAGES, 0, -1)) do
  local is_readable, stage = pcall(read, STAGE, entry) -- another program may have written it
  if is_readable then call('UNLINK', stage_key(stage)) end
end
for _, worker in ipairs(call('HKEYS', own.key .. ':worker')) do call('ZREM', BEATS, beat_member(own, worker)) end
for _, part in ipairs(parts) do call('UNLINK', own.key .. part) end
return 1
