-- The item log. ARGV: 'read', after which number, how many to return at most, and what is known of that item (see
-- `is_replaced`); or 'trim', through which number to forget, and roles with the cursors that they must have.
-- Returns after which number it really was, and entries: the number of the last item, the request's fingerprint with the
-- index of its first item and the token, the items. The first entry may begin too early, and the last one end too late.

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
  if number > own.items then return redis.error_reply(REWOUND) end
  call('HSET', own.key, 'trimmed', number)
  return call('XTRIM', key, 'MINID', '=', number + 1 .. '-0')
end

if is_replaced(ARGV[8], ARGV[9]) then return redis.error_reply(REWOUND) end

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
