-- Check that the item log has no gap. ARGV: the last item that was checked, how many entries to read. Returns the last item
-- that is checked now ('' at the end), and the faults. Reading stays short if items are trimmed meanwhile.

local at, count = tonumber(ARGV[5]), tonumber(ARGV[6])
at = math.max(at, tonumber(call('HGET', own.key, 'trimmed')) or 0)
local entries = call('XRANGE', own.key .. ':items', string.format('%.0f-0', at + 1), '+', 'COUNT', count)
for _, entry in ipairs(entries) do
  local last = tonumber(string.match(entry[1], '^%d+'))
  local missing = last - (#entry[2] / 2 - 1) - at
  if missing > 0 then blame('items', string.format('item %.0f', at + 1), missing) end
  at = last
end
if #entries == count then return {string.format('%.0f', at), found_faults()} end
if own.items > at then blame('items', string.format('item %.0f', at + 1), own.items - at) end
return {'', found_faults()}
