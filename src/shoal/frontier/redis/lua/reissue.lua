-- Keep leases under new tokens: whoever has the old ones has lost them. ARGV: for how many seconds from now, their
-- fingerprints and tokens, a nonce. Returns the new token of each, 0 where the lease was lost: the same one again to
-- whoever comes again with the same nonce.

local until_when, nonce = now + tonumber(ARGV[5]), ARGV[7]
local fingerprints, tokens, requests = read_leases(ARGV[6])
local slot_entries, sent_entries = fetch(own.key .. ':slot', fingerprints), fetch(own.key .. ':sent', fingerprints)
local token, members, slots, sent, reissued, answer = last_token(), {}, {}, {}, {}, {}

-- Whether it was reissued from this token, with this nonce.
local function is_again(request, entry, old_token)
  if not entry then return false end
  local current, before, at = read(SENT, entry)
  return current == request.token and before == old_token and sub(entry, at) == nonce
end

-- What was leased under a slot stays that slot's.
local function keep_slot(fingerprint, entry, old_token)
  local held_under, epoch, at = read(SLOT, entry)
  if held_under == old_token then
    slots[#slots + 1] = fingerprint
    slots[#slots + 1] = slot_entry(token, epoch, sub(entry, at))
  end
end

local function renumber(i, request)
  local fingerprint = fingerprints[i]
  token = token + 1
  if slot_entries[i] then keep_slot(fingerprint, slot_entries[i], request.token) end
  request.token = token
  save_record(own, fingerprint, request)
  sent[#sent + 1] = fingerprint
  sent[#sent + 1] = sent_entry(token, tokens[i], nonce)
end

for i, request in ipairs(requests) do
  local fingerprint = fingerprints[i]
  answer[i] = 0
  if request and not reissued[fingerprint] then -- the second of two equal ones is stale
    local is_current = request.token == tokens[i]
    if is_current or is_again(request, sent_entries[i], tokens[i]) then
      reissued[fingerprint] = true
      if is_current then renumber(i, request) end
      answer[i] = request.token
      members[#members + 1] = until_when
      members[#members + 1] = lease_member(own, request.host, fingerprint)
    end
  end
end
if #sent > 0 then own.token, own.is_changed = token, true end
finish()
many('ZADD', LEASES, members)
many('HSET', own.key .. ':slot', slots)
many('HSET', own.key .. ':sent', sent)
return answer
