-- The item log. ARGV: 'read', after which number, how many to return at most, the token of that item or '', its
-- fingerprint with its index or ''; or 'trim', through which number to forget. Returns after which number it really was, and entries: the number of the last item, the request's fingerprint
-- with the index of its first item and the token, the items. The first entry may begin too early, and the last one end too late.

local key, number = own.key .. ':items', tonumber(ARGV[6])
local trimmed = tonumber(call('HGET', own.key, 'trimmed')) or 0
if ARGV[5] == 'trim' then
  if number <= trimmed then return 0 end
  if number > own.items then return redis.error_reply(REWOUND) end
  call('HSET', own.key, 'trimmed', number)
  return call('XTRIM', key, 'MINID', '=', number + 1 .. '-0')
end

local token, which = ARGV[8], ARGV[9]

-- Whether the log has that item, or another one in its place. The items of a page are one entry, named by its last one.
local function is_replaced()
  if number > own.items then return true end
  local entry = call('XRANGE', key, number .. '-0', '+', 'COUNT', 1)[1]
  if not entry then return false end
  local fingerprint, index, under = read('<c16I4c8', entry[2][2])
  if under ~= token then return true end
  local last, count = tonumber(string.match(entry[1], '^%d+')), #entry[2] / 2 - 1
  return which ~= '' and which ~= fingerprint .. pack('<I4', index + count - 1 - (last - number))
end

if token ~= '' and number > trimmed and is_replaced() then return redis.error_reply(REWOUND) end

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
