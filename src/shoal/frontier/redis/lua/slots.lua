-- What is known of some leases and roles beside their records: slots of clusters, under which both may be held, and
-- leases that were taken to be sent.
--
-- Of each run, `slot` has what was leased under a slot and has not ended, by fingerprint, and `role_slot` under which one
-- each role was last claimed. An entry counts as long as its token is the current one. `fence` has of each slot the
-- epoch before which nothing is given to it.
--
-- `sent` has, by fingerprint, the tokens of leases that nobody has begun yet.

local ROLE = '<c8dB' -- token, until when, whether it is finished; then its cursor
local SLOT = '<c8I8' -- token, epoch; then the slot

local function slot_entry(token, epoch, slot) return pack(SLOT, token, epoch) .. slot end

-- An answer that refuses what was asked for under an epoch that is over, or nil.
local function fenced(slot, epoch)
  local latest = tonumber(call('HGET', own.key .. ':fence', slot))
  if latest and latest > epoch then
    return redis.error_reply(string.format('FENCED slot %s is held under epoch %.0f by now', slot, latest))
  end
end

-- Whether an entry of `sent` says of a request that its lease is not begun: then the last of its attempts does not count.
local function is_unbegun(request, entry)
  return entry and request and request.state == LEASED and entry == request.token
end

-- These leases are over. Most runs have none under a slot, and none that was sent.
local function forget(run, fingerprints)
  for _, part in ipairs({':slot', ':sent'}) do
    if call('EXISTS', run.key .. part) == 1 then many('HDEL', run.key .. part, fingerprints) end
  end
end

-- Whether a stored cursor may be moved: it is the one that its holder knows, or the new one already, in a repeated call.
-- Otherwise the store was rewound.
local function is_movable(stored, before, cursor) return stored == before or stored == cursor end

-- Whether the item log has another item, or none, where a client has read one. It is known by its number, and by the token,
-- fingerprint and index that it had. The items of a page are one entry, named by its last one. What was trimmed is not
-- checked.
local function is_replaced(number, known)
  if known == '' then return false end
  number = tonumber(number)
  if number > own.items then return true end
  if number <= (tonumber(call('HGET', own.key, 'trimmed')) or 0) then return false end
  local entry = call('XRANGE', own.key .. ':items', number .. '-0', '+', 'COUNT', 1)[1]
  if not entry then return false end
  local fingerprint, index, token = read('<c16I4c8', entry[2][2])
  local last, count = tonumber(string.match(entry[1], '^%d+')), #entry[2] / 2 - 1
  return known ~= token .. fingerprint .. pack('<I4', index + count - 1 - (last - number))
end
