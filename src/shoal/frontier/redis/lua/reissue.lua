-- Give leases new tokens, so that the old ones are lost. ARGV: ttl, fingerprints and tokens, the new tokens. Returns 1 for
-- each lease that has its new token, also if this call is a repeat, and 0 if it was lost.

local until_when, new_tokens = now + tonumber(ARGV[5]), ARGV[7]
local fingerprints, tokens, requests = read_leases(ARGV[6])
local slot_entries = fetch(own.key .. ':slot', fingerprints)
local members, slots, begun, reissued, answer = {}, {}, {}, {}, {}

-- A lease stays with its slot.
local function keep_slot(fingerprint, entry, old_token, token)
  local held_under, epoch, at = read(SLOT, entry)
  if held_under == old_token then
    slots[#slots + 1] = fingerprint
    slots[#slots + 1] = slot_entry(token, epoch, sub(entry, at))
  end
end

for i, request in ipairs(requests) do
  local fingerprint, token = fingerprints[i], sub(new_tokens, TOKEN_SIZE * (i - 1) + 1, TOKEN_SIZE * i)
  answer[i] = 0
  if request and not reissued[fingerprint] then -- the second of two equal ones is stale
    local is_current = request.token == tokens[i]
    if is_current or request.token == token then
      reissued[fingerprint] = true
      if is_current then
        if slot_entries[i] then keep_slot(fingerprint, slot_entries[i], request.token, token) end
        request.token = token
        save_record(own, fingerprint, request)
        begun[#begun + 1] = fingerprint
      end
      answer[i] = 1
      members[#members + 1] = until_when
      members[#members + 1] = lease_member(own, request.host, fingerprint)
    end
  end
end
finish()
many('ZADD', LEASES, members)
many('HSET', own.key .. ':slot', slots)
many('HDEL', own.key .. ':sent', begun)
return answer
