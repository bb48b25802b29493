-- States of the runs of a spider. ARGV: its name. Returns run_id, state, ... oldest first.

local numbers, answer = call('HVALS', PREFIX .. 'runs'), {}
for i, number in ipairs(numbers) do numbers[i] = tonumber(number) end
table.sort(numbers)
for _, number in ipairs(numbers) do
  local run = call('HMGET', PREFIX .. 'run:' .. number, 'run_id', 'spider', 'state')
  if run[1] and run[2] == ARGV[5] then
    answer[#answer + 1] = run[1]
    answer[#answer + 1] = run[3]
  end
end
return answer
