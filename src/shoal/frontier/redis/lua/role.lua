-- Roles of a run. ARGV: what to do, the role, then for
--   claim: token, ttl, slot and epoch if any -> the cursor, or nothing
--   advance: token, known cursor, ttl, new cursor, the last item before it -> 1, or 0 if the role was lost
--   relinquish: token, known cursor, 1 if finished -> 1, or 0 if the role was lost
--   list -> name, 1 if held, 1 if finished, cursor, ...

local act, name, key = ARGV[5], ARGV[6], own.key .. ':role'

if act == 'list' then
  local answer, roles = {}, call('HGETALL', key)
  for i = 1, #roles, 2 do
    local token, until_when, finished, at = read(ROLE, roles[i + 1])
    local held = token ~= NO_TOKEN and until_when > now and 1 or 0
    for _, value in ipairs({roles[i], held, finished, sub(roles[i + 1], at)}) do answer[#answer + 1] = value end
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
  local slot, epoch = ARGV[9], tonumber(ARGV[10])
  local refusal = slot and fenced(slot, epoch)
  if refusal then return refusal end
  if finished == 1 or (until_when > now and token ~= given) then return {} end
  call('HSET', key, name, pack(ROLE, given, now + tonumber(ARGV[8]), 0) .. cursor)
  save_state()
  if slot then call('HSET', own.key .. ':role_slot', name, slot_entry(given, epoch, slot)) end
  return {cursor}
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
