-- In front of every script: the server's clock, the members of a cluster, their slots, and what is told of them.
--
-- Every step first loses the members whose time is over, so nobody has to watch over them. A heartbeat writes nothing to
-- the events, so it wakes nobody.
--
-- ARGV: prefix of the keys, name of the cluster; then what the script itself is given.

local call, pack, unpacked = redis.call, cmsgpack.pack, cmsgpack.unpack
local KEPT = 200 -- events

local function key(part) return ARGV[1] .. 'cluster:' .. part .. ':' .. ARGV[2] end
local HEAD = key('head') -- how many Runners and Backup Runners there are to be, and the last epoch
local MEMBERS = key('member') -- by name: session, ttl, where it is, what it does, 1 if it is fit, when it was heard of
local LIVES = key('life') -- members by when they are lost
local SLOTS = key('slot') -- by index: the holder or '', its epoch, and who was lost with it or ''
local EVENTS = key('event')

local clock = call('TIME')
local microseconds = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local now = microseconds / 1000000

local function tell(what, member, slot, epoch, detail)
  call(
    'XADD', EVENTS, 'MAXLEN', KEPT, '*', 'at', string.format('%.6f', now), 'what', what, 'member', member,
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

-- Whether the member still is the one that joined with this session.
local function lives(name, session)
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

-- Which slot a member has, and its epoch; or nothing.
local function slot_of(name)
  for index, slot in pairs(all_slots()) do
    if slot.holder == name then return index, slot.epoch end
  end
end

-- A member has its slot no longer; `lost` is its name if nobody knows what became of it. Returns which slot it was.
local function vacate(name, lost)
  local index, epoch = slot_of(name)
  if index then save_slot(index, '', epoch, lost) end
  return index, epoch
end

-- It is no member any more, and has no slot.
local function drop(name, lost)
  local index, epoch = vacate(name, lost)
  call('HDEL', MEMBERS, name)
  call('ZREM', LIVES, name)
  return index, epoch
end

-- -- what everybody sees

-- The time, the last event, the counts, and members and slots as they are stored.
local function view()
  local last = call('XREVRANGE', EVENTS, '+', '-', 'COUNT', 1)[1]
  local runner, backup = unpack(call('HMGET', HEAD, 'runner', 'backup'))
  return {
    string.format('%.6f', now), last and last[1] or '0-0', tonumber(runner) or 0, tonumber(backup) or 0,
    call('HGETALL', MEMBERS), call('HGETALL', SLOTS),
  }
end

for _, name in ipairs(call('ZRANGEBYSCORE', LIVES, '-inf', now)) do
  local index, epoch = drop(name, name)
  tell('lost', name, index, epoch)
end
