-- The item log. ARGV: 'read', the number to read after, the limit, the known item at that number (see `is_replaced`), and the
-- most bytes or ''; or 'trim', the last number to delete, and roles with the cursors that they must have.
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
local from, reach, left = after, after + limit, tonumber(ARGV[10])
local count = left and 1 or 50

-- How many words of an entry fit: its key, and items with their names. The first item that is wanted always fits.
local is_first = true
local function fitting(words, last)
  for i = 4, #words, 2 do
    local item = last - (#words - i) / 2
    if item > after then
      if #words[i] > left and not is_first then return i - 2 end
      left, is_first = left - #words[i], false
    end
  end
  return #words
end

while from < reach do
  local some = call('XRANGE', key, from + 1 .. '-0', '+', 'COUNT', math.min(count, limit))
  if #some == 0 then break end
  for _, entry in ipairs(some) do
    if from >= reach then break end
    from = tonumber(string.match(entry[1], '^%d+'))
    local words = entry[2]
    local fit = left and fitting(words, from) or #words
    if fit > 2 then entries[#entries + 1] = {from - (#words - fit) / 2, unpack(words, 1, fit)} end
    if fit < #words then return {after, entries} end
  end
  if left then count = math.max(1, math.min(50, math.floor(#entries * left / (ARGV[10] - left + 1)))) end
end
return {after, entries}
