-- How hosts are treated. ARGV: their numbers. Returns the time, the host "*", the run's options, then for each host its
-- record and how many requests of the run are ready there.

local numbers = arguments_from(5)
local records = fetch(HOSTS, {0, unpack(numbers)})
local answer = {string.format('%.6f', now), records[1] or '', own.options or OPTIONS}
for i, number in ipairs(numbers) do
  answer[#answer + 1] = records[i + 1] or save_host(new_host(tonumber(number), ''))
  answer[#answer + 1] = call('ZCARD', queue_key(own, number))
end
return answer
