-- Delete leases and queues of a deleted run, in steps. ARGV: its number, cursor of the leases ('' when they are done).
-- Returns the next cursor, '' to continue with the queues, and nothing at the end.

local number, cursor = tonumber(ARGV[5]), ARGV[6]
local key = PREFIX .. 'run:' .. number

if cursor ~= '' then
  local page, members, numbers = call('ZSCAN', LEASES, cursor, 'COUNT', 1000), {}, {}
  for i = 1, #page[2], 2 do
    local run, host = read(LEASE_MEMBER, page[2][i])
    if run == number then
      members[#members + 1] = page[2][i]
      numbers[#numbers + 1] = host
    end
  end
  load_hosts(numbers)
  for _, each in ipairs(numbers) do end_lease(nil, hosts[each], true) end
  finish()
  many('ZREM', LEASES, members)
  return page[1] ~= '0' and page[1] or ''
end

local page, numbers, queues = call('HSCAN', key .. ':lane', '0', 'COUNT', 500), {}, {}
for i = 1, #page[2], 2 do
  numbers[#numbers + 1] = page[2][i]
  queues[#queues + 1] = key .. ':q:' .. page[2][i]
  queues[#queues + 1] = key .. ':p:' .. page[2][i]
end
many('HDEL', key .. ':lane', numbers)
for _, queue in ipairs(queues) do call('UNLINK', queue) end
if call('EXISTS', key .. ':lane') == 1 then return '' end
call('HDEL', PREFIX .. 'deleted', number)
return false
