-- Move some lanes of the run to where they belong after a change. ARGV: cursor. Returns the next cursor ('0' at the end).

local page, numbers = call('HSCAN', own.key .. ':lane', ARGV[5], 'COUNT', 500), {}
for i = 1, #page[2], 2 do
  numbers[#numbers + 1] = tonumber(page[2][i])
  touch(own, numbers[#numbers], 'stale')
end
load_hosts(numbers)
finish()
return page[1]
