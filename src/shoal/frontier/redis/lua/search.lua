-- Search requests for some bytes. ARGV: cursor, how many to read, the bytes. Returns the next cursor ('0' at the end), and
-- the matches: fingerprint, record, ...

local found = {}
local cursor = scan(own.key .. ':req', ARGV[5], ARGV[6], function(fingerprint, record)
  if string.find(record, ARGV[7], MIN_SIZE + 1, true) then
    found[#found + 1] = fingerprint
    found[#found + 1] = record
  end
end)
return {cursor, found}
