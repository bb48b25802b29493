-- Politeness of hosts: of one host, if ARGV names it, else of the busiest ones. Returns the time, the host "*", the run's
-- options, then for each host its record, how many requests of the run are ready, and the longest delay of other runs that
-- share it, with the name of that run. If there are very many hosts, it returns those that are likely to be busiest.

if now < met_until then define_turns() end
local ALL, SOME = 1000, 300
local numbers, is_listed = {}, {}
local function list(number)
  if not is_listed[number] then
    is_listed[number] = true
    numbers[#numbers + 1] = number
  end
end

local name = ARGV[5]
if name then
  list(call('HGET', PREFIX .. 'name', name) or '') -- no host has the number ''
elseif call('HLEN', own.key .. ':lane') <= ALL then
  for _, number in ipairs(call('HKEYS', own.key .. ':lane')) do list(number) end
else
  for _, member in ipairs(call('ZRANGE', LEASES, 0, ALL - 1)) do
    local run, number = read(LEASE_MEMBER, member)
    if run == own.number then list(number) end
  end
  for _, part in ipairs({':full', ':later'}) do
    for _, number in ipairs(call('ZRANGE', own.key .. part, 0, SOME - 1)) do list(number) end
  end
  for _, member in ipairs(call('ZRANGE', own.key .. ':open', 0, SOME - 1)) do list((select(2, read(OPEN_LANE, member)))) end
end

load_hosts(numbers)
load_lanes(own, numbers)
local answer = {string.format('%.6f', now), whole_host(hosts[ALL_HOSTS]), own.options or OPTIONS}
for _, number in ipairs(numbers) do
  answer[#answer + 1] = whole_host(hosts[number])
  local front = math.floor(#own.lanes[number] / FRONTED_SIZE)
  answer[#answer + 1] = front + call('LLEN', list_key(own, number)) + call('ZCARD', set_key(own, number))
  local longest, of
  if turns then longest, of = turns.longest_of(hosts[number], own) end
  answer[#answer + 1] = longest and string.format('%.17g', longest) or ''
  answer[#answer + 1] = of and of.name or ''
end
return answer
