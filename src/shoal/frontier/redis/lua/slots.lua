-- Slots of clusters, workers, leases that are not begun, and checks of cursors and items.
--
-- `slot` has the leases under a slot, by fingerprint; `role_slot` has the slot of each role. An entry is valid while its
-- token is the current one. `fence` has the first valid epoch of each slot. `holder` has the numbers of slots in records,
-- by `=` and name, and their names, by `#` and number.
--
-- `worker` has the workers that send heartbeats: see beats.lua.
--
-- `sent` has the tokens of leases that no worker has begun, by fingerprint.

local SLOT = '<c8I8' -- token, epoch; then the slot

local function slot_entry(token, epoch, slot) return pack(SLOT, token, epoch) .. slot end

-- The error to return if the slot was fenced with a later epoch, or nil.
local function fenced(slot, epoch)
  local latest = tonumber(call('HGET', own.key .. ':fence', slot))
  if latest and latest > epoch then
    return redis.error_reply(string.format('%s slot %s is now held under epoch %.0f', FENCED, slot, latest))
  end
end

-- The number of a slot in records. A new slot gets one, which writes to the store; 0 if there are too many.
local function holder_number(slot)
  local key = own.key .. ':holder'
  local number = tonumber(call('HGET', key, '=' .. slot))
  if not number then
    number = call('HINCRBY', key, 'last', 1)
    if number > MAX_WORKERS then return 0 end
    call('HSET', key, '=' .. slot, number, '#' .. number, slot)
  end
  return number
end

-- Whether the lease of a request is not begun, by its entry in `sent`. Then its last attempt does not count.
local function is_unbegun(request, entry)
  return entry and request and request.state == LEASED and entry == request.token
end

-- Delete the entries of ended leases. Most runs have none.
local function forget(run, fingerprints)
  for _, part in ipairs({':slot', ':sent'}) do
    if call('EXISTS', run.key .. part) == 1 then many('HDEL', run.key .. part, fingerprints) end
  end
end

-- Whether a cursor may be moved: it is the one that its holder knows, or already the new one, in a repeated call. Otherwise
-- the store was rewound.
local function is_movable(stored, before, cursor) return stored == before or stored == cursor end

-- Whether the item log has another item, or none, where a client has read one. `known` is its token, fingerprint and index.
-- The items of a page are one entry, whose id is the number of its last item. Trimmed items are not checked.
local function is_replaced(number, known)
  if known == '' then return false end
  number = tonumber(number)
  if number > own.items then return true end
  if number <= (tonumber(call('HGET', own.key, 'trimmed')) or 0) then return false end
  local entry = call('XRANGE', own.key .. ':items', number .. '-0', '+', 'COUNT', 1)[1]
  if not entry then return false end
  local fingerprint, index, token = read(ITEM_KEY, entry[2][2])
  local last, count = tonumber(string.match(entry[1], '^%d+')), #entry[2] / 2 - 1
  return known ~= pack(KNOWN_ITEM, token, fingerprint, index + count - 1 - (last - number))
end
