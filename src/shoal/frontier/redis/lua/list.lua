-- Fields of runs, newest first. ARGV: spider, project and states (separated by spaces), '' for all; at most how many, -1 for
-- all; the fields. Returns for each run its number and the fields.

local numbers, answer, fields = call('HVALS', PREFIX .. 'runs'), {}, arguments_from(9)
local states, limit = ' ' .. ARGV[7] .. ' ', tonumber(ARGV[8])
for i, number in ipairs(numbers) do numbers[i] = tonumber(number) end
table.sort(numbers, function(a, b) return a > b end)
for _, number in ipairs(numbers) do
  if #answer == limit then break end
  local key = PREFIX .. 'run:' .. number
  local is = call('HMGET', key, 'spider', 'project', 'state')
  if is[1] and (ARGV[5] == '' or ARGV[5] == is[1]) and (ARGV[6] == '' or ARGV[6] == is[2])
      and (ARGV[7] == '' or string.find(states, ' ' .. is[3] .. ' ', 1, true)) then
    answer[#answer + 1] = {number, unpack(call('HMGET', key, unpack(fields)))}
  end
end
return answer
