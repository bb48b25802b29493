-- Roles of a run. ARGV: what to do, the role, then for
--   claim: seconds, slot and epoch if any -> token and cursor, or nothing
--   advance: token, seconds, cursor       -> 1, or 0 when it was lost
--   relinquish: token, 1 if finished      -> 1, or 0 when it was lost
--   list                                  -> name, 1 if held, 1 if finished, cursor, ...

local act, name, key = ARGV[5], ARGV[6], own.key .. ':role'

if act == 'list' then
  local answer, roles = {}, call('HGETALL', key)
  for i = 1, #roles, 2 do
    local token, until_when, finished, at = read(ROLE, roles[i + 1])
    local held = token ~= 0 and until_when > now and 1 or 0
    for _, value in ipairs({roles[i], held, finished, sub(roles[i + 1], at)}) do answer[#answer + 1] = value end
  end
  return answer
end

local role = call('HGET', key, name)
local token, until_when, finished, cursor = 0, 0, 0, ''
if role then
  local at
  token, until_when, finished, at = read(ROLE, role)
  cursor = sub(role, at)
end

if act == 'claim' then
  local slot, epoch = ARGV[8], tonumber(ARGV[9])
  local refusal = slot and fenced(slot, epoch)
  if refusal then return refusal end
  if finished == 1 or until_when > now then return {} end
  own.token = last_token() + 1
  call('HSET', key, name, pack(ROLE, own.token, now + tonumber(ARGV[7]), 0) .. cursor)
  call('HSET', own.key, 'token', own.token)
  if slot then call('HSET', own.key .. ':role_slot', name, slot_entry(own.token, epoch, slot)) end
  return {own.token, cursor}
end

if token == 0 or token ~= tonumber(ARGV[7]) then return 0 end
if act == 'advance' then
  call('HSET', key, name, pack(ROLE, token, now + tonumber(ARGV[8]), 0) .. ARGV[9])
else
  call('HSET', key, name, pack(ROLE, 0, 0, tonumber(ARGV[8])) .. cursor)
end
return 1
