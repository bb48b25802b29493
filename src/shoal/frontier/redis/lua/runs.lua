-- One run, or all runs, newest first. ARGV: run_id, or nothing. Returns for each: number, run_id, spider, state, time of
-- creation, settings.

local numbers, answer = {}, {}
if ARGV[5] then
  numbers = {call('HGET', PREFIX .. 'runs', ARGV[5]) or nil}
else
  numbers = call('HVALS', PREFIX .. 'runs')
end
for i, number in ipairs(numbers) do numbers[i] = tonumber(number) end
table.sort(numbers, function(a, b) return a > b end)
for _, number in ipairs(numbers) do
  local run = call('HMGET', PREFIX .. 'run:' .. number, 'run_id', 'spider', 'state', 'created_at', 'settings')
  if run[1] then answer[#answer + 1] = {number, unpack(run)} end
end
return answer
