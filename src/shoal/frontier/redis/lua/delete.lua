-- Forget a run. Its places on hosts come free, and its keys go, but for its lanes: they may be many, and are swept by
-- sweep.lua, for which the run is remembered until that is done.

local mine, leases, numbers = pack('>I4', own.number), {}, {}
for _, member in ipairs(call('ZRANGE', LEASES, 0, -1)) do
  if sub(member, 1, 4) == mine then
    leases[#leases + 1] = member
    numbers[#numbers + 1] = read('>I4', member, 5)
  end
end
load_hosts(numbers)
call('SADD', PREFIX .. 'deleted', own.number)
many('ZREM', LEASES, leases)
local parts = {
  ':req', ':role', ':items', ':event', ':dead', ':kinds', ':waiting', ':open', ':later', ':slot', ':sent', ':role_slot',
  ':fence', ':rewinds',
}
for _, part in ipairs(parts) do call('UNLINK', own.key .. part) end
call('HDEL', PREFIX .. 'runs', call('HGET', own.key, 'run_id'))
call('UNLINK', own.key)
runs[own.number] = false
for _, number in ipairs(numbers) do returned(hosts[number], true) end
finish()
return 1
