-- Forget the lanes of deleted runs, some at a time. Returns how many runs are left to sweep.

local number = call('SRANDMEMBER', PREFIX .. 'deleted')
if not number then return 0 end
local key = PREFIX .. 'run:' .. number
local numbers, queues, cursor = {}, {}, '0'
repeat
  local page = call('HSCAN', key .. ':lane', cursor, 'COUNT', 500)
  cursor = page[1]
  for i = 1, #page[2], 2 do
    numbers[#numbers + 1] = tonumber(page[2][i])
    queues[#queues + 1] = key .. ':q:' .. page[2][i]
  end
until cursor == '0' or #numbers > 0
if #numbers == 0 then
  call('UNLINK', key .. ':lane')
  call('SREM', PREFIX .. 'deleted', number)
  return call('SCARD', PREFIX .. 'deleted')
end
load_hosts(numbers)
for first = 1, #queues, MOST do call('UNLINK', unpack(queues, first, math.min(first + MOST - 1, #queues))) end
many('HDEL', key .. ':lane', numbers)
for _, each in ipairs(numbers) do free(hosts[each]) end -- which leaves out runs that are no more
finish()
return call('SCARD', PREFIX .. 'deleted')
