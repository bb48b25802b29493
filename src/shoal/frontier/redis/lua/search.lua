-- Search requests for some bytes. ARGV: cursor, how many to read, the bytes. Returns the next cursor ('0' at the end), then
-- fingerprint, record, ... of matches.

local cursor, budget, needle = ARGV[5], tonumber(ARGV[6]), ARGV[7]
local answer = {''}
repeat
  local page = call('HSCAN', own.key .. ':req', cursor, 'COUNT', 1000)
  cursor = page[1]
  for i = 2, #page[2], 2 do
    if string.find(page[2][i], needle, MIN_SIZE + 1, true) then
      answer[#answer + 1] = page[2][i - 1]
      answer[#answer + 1] = page[2][i]
    end
  end
  budget = budget - #page[2] / 2
until cursor == '0' or budget <= 0
answer[1] = cursor
return answer
