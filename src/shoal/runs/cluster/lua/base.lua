-- Prepended to every script: the server's clock, members, slots and events of a cluster.
--
-- Every script first removes the members whose session has ended. A heartbeat writes no event, so it wakes nobody.
--
-- ARGV: prefix of the keys, name of the cluster; then the arguments of the script.

local call, pack, unpacked = redis.call, cmsgpack.pack, cmsgpack.unpack
local MAX_EVENTS = 200

local function key(part) return ARGV[1] .. 'cluster:' .. part .. ':' .. ARGV[2] end
local HEAD = key('head') -- wanted numbers of Runners and Backup Runners, and the last epoch
local MEMBERS = key('member') -- by name: session, ttl, where, doing, 1 if fit, time of the last heartbeat
local LIVES = key('life') -- members by the end of their session
local SLOTS = key('slot') -- by index: holder or '', epoch, and the last holder if it was lost or ''
local EVENTS = key('event')

local clock = call('TIME')
local microseconds = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local now = microseconds / 1000000

local function record_event(what, member, slot, epoch, detail)
  call(
    'XADD', EVENTS, 'MAXLEN', MAX_EVENTS, '*', 'at', string.format('%.6f', now), 'what', what, 'member', member,
    'slot', slot or '', 'epoch', epoch or 0, 'detail', detail or ''
  )
end

-- -- members

local function save_member(name, session, ttl, where, doing, fit)
  call('HSET', MEMBERS, name, pack({session, ttl, where, doing, fit, now}))
  call('ZADD', LIVES, now + ttl, name)
end

local function member_of(name)
  local record = call('HGET', MEMBERS, name)
  return record and unpacked(record)
end

-- Whether this session is still a member.
local function is_member(name, session)
  local member = member_of(name)
  return member and member[1] == session
end

-- -- slots

local function all_slots()
  local found, slots = {}, call('HGETALL', SLOTS)
  for i = 1, #slots, 2 do
    local holder, epoch, lost = unpack(unpacked(slots[i + 1]))
    found[tonumber(slots[i])] = {holder = holder, epoch = epoch, lost = lost}
  end
  return found
end

local function save_slot(index, holder, epoch, lost) call('HSET', SLOTS, index, pack({holder, epoch, lost})) end

-- The index and epoch of a member's slot, or nothing.
local function slot_of(name)
  for index, slot in pairs(all_slots()) do
    if slot.holder == name then return index, slot.epoch end
  end
end

-- Free a member's slot. `lost`: its name if it was lost, else ''. Returns index and epoch of the slot.
local function vacate(name, lost)
  local index, epoch = slot_of(name)
  if index then save_slot(index, '', epoch, lost) end
  return index, epoch
end

-- Remove a member and free its slot.
local function remove_member(name, lost)
  local index, epoch = vacate(name, lost)
  call('HDEL', MEMBERS, name)
  call('ZREM', LIVES, name)
  return index, epoch
end

-- -- view

-- The time, the last event, the wanted numbers, and members and slots as stored.
local function view()
  local last = call('XREVRANGE', EVENTS, '+', '-', 'COUNT', 1)[1]
  local runner, backup = unpack(call('HMGET', HEAD, 'runner', 'backup'))
  return {
    string.format('%.6f', now), last and last[1] or '0-0', tonumber(runner) or 0, tonumber(backup) or 0,
    call('HGETALL', MEMBERS), call('HGETALL', SLOTS),
  }
end

for _, name in ipairs(call('ZRANGEBYSCORE', LIVES, '-inf', now)) do
  local index, epoch = remove_member(name, name)
  record_event('lost', name, index, epoch)
end
