-- Fence slots: revoke their leases and roles under earlier epochs. ARGV: the slot, the first epoch that stays valid. Returns
-- how many leases were revoked. Without a slot: all workers of the run that are dead, each under its next epoch. Returns
-- each worker and how many leases it had.

local epochs, names = {}, {} -- by slot: the first epoch that stays valid
if ARGV[5] then
  epochs[ARGV[5]], names[1] = tonumber(ARGV[6]), ARGV[5]
  local refusal = fenced(ARGV[5], epochs[ARGV[5]])
  if refusal then return refusal end
else
  for _, late in ipairs(late_workers(own)) do
    if late.dead_in == 0 then epochs[late.name], names[#names + 1] = late.epoch + 1, late.name end
  end
  if #names == 0 then return {} end
end

-- -- reading

-- The entries of these slots under earlier epochs: their names, tokens and slots.
local function given(key)
  local found, tokens, slots, entries = {}, {}, {}, call('HGETALL', key)
  for i = 1, #entries, 2 do
    local token, under, at = read(SLOT, entries[i + 1])
    local slot = sub(entries[i + 1], at)
    if epochs[slot] and under < epochs[slot] then
      found[#found + 1], tokens[#tokens + 1], slots[#slots + 1] = entries[i], token, slot
    end
  end
  return found, tokens, slots
end

local fingerprints, tokens, slots = given(own.key .. ':slot')
local counts = {}
local records, lost, numbers = fetch(own.key .. ':req', fingerprints), {}, {}
local sent = fetch(own.key .. ':sent', fingerprints)
for i, fingerprint in ipairs(fingerprints) do
  local request = read_record(records[i])
  if request and request.state == LEASED and request.token == tokens[i] then
    lost[#lost + 1] = {fingerprint = fingerprint, request = request, unbegun = is_unbegun(request, sent[i])}
    numbers[#numbers + 1] = request.host
    counts[slots[i]] = (counts[slots[i]] or 0) + 1
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
for _, slot in ipairs(names) do call('HSET', own.key .. ':fence', slot, string.format('%.0f', epochs[slot])) end
finish()
many('ZREM', LEASES, leases)
forget(own, fingerprints)
many('HSET', own.key .. ':role', free_roles)
many('HDEL', own.key .. ':role_slot', roles)
many('HDEL', own.key .. ':worker', names)
local members = {}
for i, name in ipairs(names) do members[i] = beat_member(own, name) end
many('ZREM', BEATS, members)
if ARGV[5] then return #lost end
local answer = {}
for _, worker in ipairs(names) do
  answer[#answer + 1], answer[#answer + 2] = worker, counts[worker] or 0
end
return answer
