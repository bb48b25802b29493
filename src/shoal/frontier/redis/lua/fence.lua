-- Fence a slot: revoke its leases and roles under earlier epochs. ARGV: the slot, the first epoch that stays valid.
-- Returns how many leases were revoked.

local slot, epoch = ARGV[5], tonumber(ARGV[6])
local refusal = fenced(slot, epoch)
if refusal then return refusal end

-- -- reading

-- The entries of the slot under earlier epochs: their names and tokens.
local function given(key)
  local names, tokens, entries = {}, {}, call('HGETALL', key)
  for i = 1, #entries, 2 do
    local token, under, at = read(SLOT, entries[i + 1])
    if under < epoch and sub(entries[i + 1], at) == slot then
      names[#names + 1], tokens[#tokens + 1] = entries[i], token
    end
  end
  return names, tokens
end

local fingerprints, tokens = given(own.key .. ':slot')
local records, lost, numbers = fetch(own.key .. ':req', fingerprints), {}, {}
local sent = fetch(own.key .. ':sent', fingerprints)
for i, fingerprint in ipairs(fingerprints) do
  local request = read_record(records[i])
  if request and request.state == LEASED and request.token == tokens[i] then
    lost[#lost + 1] = {fingerprint = fingerprint, request = request, unbegun = is_unbegun(request, sent[i])}
    numbers[#numbers + 1] = request.host
  end
end
load_hosts(numbers)

local roles, role_tokens = given(own.key .. ':role_slot')
local found, free_roles = fetch(own.key .. ':role', roles), {}
for i, name in ipairs(roles) do
  if found[i] then
    local token, _, finished, at = read(ROLE, found[i])
    if token == role_tokens[i] then
      free_roles[#free_roles + 1] = name
      free_roles[#free_roles + 1] = pack(ROLE, NO_TOKEN, 0, finished) .. sub(found[i], at)
    end
  end
end

-- -- changing

local leases = {}
for i, each in ipairs(lost) do
  leases[i] = lease_member(own, each.request.host, each.fingerprint)
  local contacted = lose(own, each.fingerprint, each.request, each.unbegun)
  end_lease(own, hosts[each.request.host], contacted)
end
call('HSET', own.key .. ':fence', slot, ARGV[6])
finish()
many('ZREM', LEASES, leases)
forget(own, fingerprints)
many('HSET', own.key .. ':role', free_roles)
many('HDEL', own.key .. ':role_slot', roles)
return #lost
