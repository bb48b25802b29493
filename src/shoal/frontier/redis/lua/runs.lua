-- Fields of one run, or of all runs, newest first. ARGV: run_id, or '' for all; the fields. Returns for each run its number
-- and the fields.

local numbers, answer, fields = {}, {}, arguments_from(6)
if ARGV[5] ~= '' then
  numbers = {call('HGET', PREFIX .. 'runs', ARGV[5]) or nil}
else
  numbers = call('HVALS', PREFIX .. 'runs')
end
for i, number in ipairs(numbers) do numbers[i] = tonumber(number) end
table.sort(numbers, function(a, b) return a > b end)
for _, number in ipairs(numbers) do
  local run = call('HMGET', PREFIX .. 'run:' .. number, unpack(fields))
  if run[1] then answer[#answer + 1] = {number, unpack(run)} end
end
return answer
