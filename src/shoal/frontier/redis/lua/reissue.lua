-- Keep leases under new tokens: whoever has the old ones has lost them. ARGV: for how many seconds from now, their
-- fingerprints and tokens. Returns the new token of each, 0 where the lease was lost.

local until_when = now + tonumber(ARGV[5])
local fingerprints, requests = read_leases(ARGV[6])
local entries = fetch(own.key .. ':slot', fingerprints)
local token, members, slots, reissued, answer = last_token(), {}, {}, {}, {}

-- What was leased under a slot stays that slot's.
local function keep_slot(fingerprint, entry, old_token)
  local held_under, epoch, at = read(SLOT, entry)
  if held_under == old_token then
    slots[#slots + 1] = fingerprint
    slots[#slots + 1] = slot_entry(token, epoch, sub(entry, at))
  end
end

for i, request in ipairs(requests) do
  local fingerprint = fingerprints[i]
  answer[i] = 0
  if request and not reissued[fingerprint] then -- the second of two equal ones is stale
    reissued[fingerprint] = true
    token = token + 1
    answer[i] = token
    if entries[i] then keep_slot(fingerprint, entries[i], request.token) end
    request.token = token
    save_record(own, fingerprint, request)
    members[#members + 1] = until_when
    members[#members + 1] = lease_member(own, request.host, fingerprint)
  end
end
if #members > 0 then own.token, own.is_changed = token, true end
finish()
many('ZADD', LEASES, members)
many('HSET', own.key .. ':slot', slots)
return answer
