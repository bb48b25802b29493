-- Add new requests. ARGV: token of the seed role or '', its known cursor, its new cursor, maximum of queued requests or '',
-- the requests, then the names of their hosts. Returns how many were new and how many known, or nothing if the queue is
-- full.

local token, before, cursor, max, blob = ARGV[5], ARGV[6], ARGV[7], tonumber(ARGV[8]), ARGV[9]
local names, offers, at = arguments_from(10), {}, 1
local role
if token ~= '' then
  role = call('HGET', own.key .. ':role', SEED_ROLE)
  if not role or role_token(role) ~= token then return {0, 0} end
  if not is_movable(sub(role, ROLE_SIZE + 1), before, cursor) then return rewound() end
end
while at <= #blob do
  offers[#offers + 1], at = read_offer(blob, at)
end
local count = find_new()
if max and count > 0 and own.ready + own.waiting + count > max then return {} end
add(offers, blob, names)
finish()
if role then call('HSET', own.key .. ':role', SEED_ROLE, sub(role, 1, ROLE_SIZE) .. cursor) end
return {count, #offers - count}
