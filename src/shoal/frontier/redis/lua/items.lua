-- The item log. ARGV: 'read', the number to read after, the limit, and the known item at that number (see `is_replaced`);
-- or 'trim', the last number to delete, and roles with the cursors that they must have.
-- 'read' returns the number after which it really reads, and entries: number of the last item; fingerprint, index of the
-- first item and token; the items. The first entry may begin too early, the last one may end too late.

local key, number = own.key .. ':items', tonumber(ARGV[6])
local trimmed = tonumber(call('HGET', own.key, 'trimmed')) or 0
if ARGV[5] == 'trim' then
  if number <= trimmed then return 0 end
  for i = 7, #ARGV, 2 do
    local role = call('HGET', own.key .. ':role', ARGV[i])
    if not role then return 0 end
    local _, _, _, at = read(ROLE, role)
    if sub(role, at) ~= ARGV[i + 1] then return 0 end
  end
  if number > own.items then return rewound() end
  call('HSET', own.key, 'trimmed', number)
  return call('XTRIM', key, 'MINID', '=', number + 1 .. '-0')
end

if is_replaced(ARGV[8], ARGV[9]) then return rewound() end

local after, limit, entries = math.max(number, trimmed), tonumber(ARGV[7]), {}
local from, reach = after, after + limit
while from < reach do
  local some = call('XRANGE', key, from + 1 .. '-0', '+', 'COUNT', math.min(50, limit))
  if #some == 0 then break end
  for _, entry in ipairs(some) do
    if from >= reach then break end
    from = tonumber(string.match(entry[1], '^%d+'))
    entries[#entries + 1] = {from, unpack(entry[2])}
  end
end
return {after, entries}
