-- Move some lanes of the run to where they belong after a change. ARGV: cursor. Returns the next cursor ('0' at the end).

local numbers = {}
local cursor = scan(own.key .. ':lane', ARGV[5], 500, function(number)
  numbers[#numbers + 1] = number
  touch(own, number, 'stale')
end)
load_hosts(numbers)
finish()
return cursor
