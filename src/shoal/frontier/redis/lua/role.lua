-- Roles of a run. ARGV: what to do, the role, then for
--   claim: token, ttl, the epoch to exceed, slot and its epoch if any -> the cursor and the epoch of the claim, or nothing
--   forget -> 1, or 0 if it is held, or there is none
--   advance: token, known cursor, ttl, new cursor, the last item before it -> 1, or 0 if the role was lost
--   relinquish: token, known cursor, 1 if finished -> 1, or 0 if the role was lost
--   list -> name, cursor, 1 if held, 1 if finished, who claimed it last, ...
--
-- `claim` has the epoch of the last claim of each role, and who made it. It has none of claims by older versions.

local act, name, key, claim_key = ARGV[5], ARGV[6], own.key .. ':role', own.key .. ':claim'

-- The epoch of the last claim of a role, and who made it.
local function last_claim(role)
  local claim = call('HGET', claim_key, role)
  if not claim then return 0, '' end
  local epoch, at = read(CLAIM, claim)
  return epoch, sub(claim, at)
end

if act == 'list' then
  local answer, roles = {}, call('HGETALL', key)
  for i = 1, #roles, 2 do
    local token, until_when, finished, at = read(ROLE, roles[i + 1])
    local held = token ~= NO_TOKEN and until_when > now and 1 or 0
    local _, holder = last_claim(roles[i])
    for _, value in ipairs({roles[i], sub(roles[i + 1], at), held, finished, holder}) do answer[#answer + 1] = value end
  end
  return answer
end

local role = call('HGET', key, name)
local given, token, until_when, finished, cursor = ARGV[7], NO_TOKEN, 0, 0, ''
if role then
  local at
  token, until_when, finished, at = read(ROLE, role)
  cursor = sub(role, at)
end

if act == 'claim' then
  local above, slot, epoch = tonumber(ARGV[9]), ARGV[10], tonumber(ARGV[11])
  local refusal = slot and fenced(slot, epoch)
  if refusal then return refusal end
  if finished == 1 or (until_when > now and token ~= given) then return {} end
  local claim_epoch = last_claim(name)
  if token ~= given then claim_epoch = math.max(math.floor(now * 1000000), claim_epoch + 1, above + 1) end
  call('HSET', key, name, pack(ROLE, given, now + tonumber(ARGV[8]), 0) .. cursor)
  call('HSET', claim_key, name, pack(CLAIM, claim_epoch) .. (slot or ''))
  save_state()
  if slot then call('HSET', own.key .. ':role_slot', name, slot_entry(given, epoch, slot)) end
  return {cursor, claim_epoch}
end

if act == 'forget' then
  if not role or until_when > now then return 0 end
  for _, part in ipairs({key, claim_key, own.key .. ':role_slot'}) do call('HDEL', part, name) end
  save_state()
  return 1
end

if token == NO_TOKEN or token ~= given then return 0 end
if act == 'advance' then
  if not is_movable(cursor, ARGV[8], ARGV[10]) or is_replaced(ARGV[11], ARGV[12]) then
    return rewound()
  end
  call('HSET', key, name, pack(ROLE, token, now + tonumber(ARGV[9]), 0) .. ARGV[10])
else
  local is_finished = tonumber(ARGV[9])
  if is_finished == 1 and cursor ~= ARGV[8] then return rewound() end
  call('HSET', key, name, pack(ROLE, NO_TOKEN, 0, is_finished) .. cursor)
end
save_state()
return 1
