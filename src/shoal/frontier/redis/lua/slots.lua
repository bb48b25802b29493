-- Slots of clusters, and roles, which like leases may be held under one.
--
-- Of each run, `slot` has what was leased under a slot and has not ended, by fingerprint, and `role_slot` under which one
-- each role was last claimed. An entry counts as long as its token is the current one. `fence` has of each slot the
-- epoch before which nothing is given to it.

local ROLE = '<I8dB' -- token, until when, whether it is finished; then its cursor
local SLOT = '<I8I8' -- token, epoch; then the slot

local function slot_entry(token, epoch, slot) return pack(SLOT, token, epoch) .. slot end

-- An answer that refuses what was asked for under an epoch that is over, or nil.
local function fenced(slot, epoch)
  local latest = tonumber(call('HGET', own.key .. ':fence', slot))
  if latest and latest > epoch then
    return redis.error_reply(string.format('FENCED slot %s is held under epoch %.0f by now', slot, latest))
  end
end

-- These leases are over. Most runs have none under a slot.
local function unslot(run, fingerprints)
  local key = run.key .. ':slot'
  if call('EXISTS', key) == 1 then many('HDEL', key, fingerprints) end
end
