-- Count requests by state. ARGV: cursor, how many to read. Returns the next cursor ('0' at the end), and the counts.

local counts = {}
for state = READY, DEAD do counts[state] = 0 end
local cursor = scan(own.key .. ':req', ARGV[5], ARGV[6], function(_, record)
  local state = string.byte(record)
  if counts[state] then counts[state] = counts[state] + 1 end
end)
return {cursor, unpack(counts, READY, DEAD)}
