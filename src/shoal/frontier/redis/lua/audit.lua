-- Count requests by state. ARGV: cursor, how many to read. Returns the next cursor ('0' at the end), and the counts.

local key, cursor, budget = own.key .. ':req', ARGV[5], tonumber(ARGV[6])
local counts = {[READY] = 0, [WAITING] = 0, [LEASED] = 0, [DONE] = 0, [DEAD] = 0}
repeat
  local page = call('HSCAN', key, cursor, 'COUNT', 1000)
  cursor = page[1]
  for i = 2, #page[2], 2 do
    local state = string.byte(page[2][i])
    if counts[state] then counts[state] = counts[state] + 1 end
  end
  budget = budget - #page[2] / 2
until cursor == '0' or budget <= 0
return {cursor, counts[READY], counts[WAITING], counts[LEASED], counts[DONE], counts[DEAD]}
