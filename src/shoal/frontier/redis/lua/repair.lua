-- Restore what is missing. ARGV: what to do, the format of the store, seconds that a lease lasts whose end was lost; cursor,
-- how many to read. Returns the next cursor ('0' at the end).
--   store: what all runs share, and roles. Returns what is lost: kind, name, ... as describe_losses() in faults.py
--   requests: what leads to requests
--   lanes: their places, and the requests in flight of their hosts
--   counters: of the run

local act, lasts, cursor, count = ARGV[5], tonumber(ARGV[7]), ARGV[8], ARGV[9]
local lost = {}

local function lose(kind, name)
  lost[#lost + 1] = kind
  lost[#lost + 1] = name
end

-- -- hosts have a record by number, and a number by name: each is restored from the other

local function repair_hosts()
  local last, numbers, names, key = 0, {}, {}, PREFIX .. 'name'
  local function visit_all(hash, visit)
    local at = '0'
    repeat at = scan(hash, at, 1000, visit) until at == '0'
  end
  visit_all(HOSTS, function(number, record)
    if number ~= ALL_HOSTS then names[read_host(number, record).name] = number end
  end)
  visit_all(key, function(name, number) numbers[number] = name end)
  for number, name in pairs(numbers) do
    if call('HEXISTS', HOSTS, number) == 0 then
      call('HSET', HOSTS, number, pack(SHORT_HOST, -1, now) .. name) -- nobody knows when it was last contacted
      lose('host', name)
    end
    last = math.max(last, (read(HOST_NUMBER, number)))
  end
  for name, number in pairs(names) do
    if call('HEXISTS', key, name) == 0 then call('HSET', key, name, number) end
    last = math.max(last, (read(HOST_NUMBER, number)))
  end
  if call('HEXISTS', PREFIX .. 'store', 'defaults') > call('HEXISTS', HOSTS, ALL_HOSTS) then
    call('HSET', HOSTS, ALL_HOSTS, pack(SHORT_HOST, -1, now) .. DEFAULT_HOST)
    lose('host', DEFAULT_HOST)
  end
  return last
end

-- In a finished run, seeding stays finished.
local function repair_roles()
  local roles = call('HKEYS', own.key .. ':claim')
  for i, role in ipairs(fetch(own.key .. ':role', roles)) do
    if not role then
      if roles[i] == SEED_ROLE and call('HGET', own.key, 'state') == 'finished' then
        call('HSET', own.key .. ':role', SEED_ROLE, pack(ROLE, NO_TOKEN, 0, 1))
      else
        call('HDEL', own.key .. ':claim', roles[i])
        lose('role', roles[i])
      end
    end
  end
end

local function repair_rewinds()
  for _ = call('LLEN', own.key .. ':rewinds') + 1, math.min(own.rewinds, 100) do
    call('LPUSH', own.key .. ':rewinds', pack(REWIND, 0, real, NONE)) -- an audit mentions rewinds for ever
    lose('rewind', tostring(own.rewinds))
  end
end

local function repair_documents()
  local key, list = PREFIX .. 'document', PREFIX .. 'documents'
  for _, name in ipairs(call('ZRANGE', list, 0, -1)) do
    if call('HEXISTS', key, name) == 0 then
      call('ZREM', list, name)
      lose('document', name)
    end
  end
  for _, name in ipairs(call('HKEYS', key)) do call('ZADD', list, 0, name) end
end

local function repair_store()
  if own.pushed < call('HLEN', own.key .. ':req') then
    for _, name in ipairs({'duplicates', 'redirects', 'item_errors'}) do lose('counter', name) end
  end
  repair_roles()
  repair_rewinds()
  repair_documents()
  local key, last_run = PREFIX .. 'store', own.number
  for _, number in ipairs(call('HVALS', PREFIX .. 'runs')) do last_run = math.max(last_run, tonumber(number)) end
  local last_host = repair_hosts()
  local values = call('HMGET', key, 'run', 'host')
  if (tonumber(values[1]) or 0) < last_run then call('HSET', key, 'run', last_run) end
  if (tonumber(values[2]) or 0) < last_host then call('HSET', key, 'host', last_host) end
  call('HSETNX', key, 'format', ARGV[6])
  -- A higher number makes all runs check their full lanes.
  state.freed, state.is_changed = math.max(state.freed, own.freed) + 1, true
  save_state()
end

-- -- requests

local function repair_requests()
  local queued, waiting, leases, numbers = {}, {}, {}, {}
  cursor = scan(own.key .. ':req', cursor, count, function(fingerprint, record)
    local request = read_record(record)
    if not request or request.state == DONE then return end
    if request.state == READY then
      queued[#queued + 1] = {fingerprint, request}
      numbers[#numbers + 1] = request.host
    elseif request.state == WAITING then
      if not call('ZSCORE', own.key .. ':waiting', fingerprint) then
        waiting[#waiting + 1] = now
        waiting[#waiting + 1] = fingerprint
      end
    elseif request.state == LEASED then
      local member = lease_member(own, request.host, fingerprint)
      if not call('ZSCORE', LEASES, member) then
        leases[#leases + 1] = string.format('%.17g', now + lasts)
        leases[#leases + 1] = member
      end
    elseif request.state == DEAD then
      local cause = call('HGET', own.key .. ':dead', fingerprint)
      if not cause then die(own, fingerprint, UNREADABLE, LOST_DEATH) end
      if cause and read(TEXT, cause) == FULL_KIND then
        local member = pack(QUEUED, request.sequence, fingerprint)
        if not call('ZSCORE', own.key .. ':refused', member) then
          own.refused[#own.refused + 1] = request.rank
          own.refused[#own.refused + 1] = member
        end
      end
    end
  end)
  load_hosts(numbers)
  load_lanes(own, numbers)
  -- What a lane does not lead to is not found by workers, but would be found again later.
  local tidied = {}
  for _, number in ipairs(numbers) do
    local more = sub(own.lanes[number], -1)
    if not tidied[number] then
      tidied[number] = true
      if more ~= '+' and more ~= '#' then call('UNLINK', list_key(own, number)) end
      if more ~= '#' then call('UNLINK', set_key(own, number)) end
    end
  end
  for _, each in ipairs(queued) do
    local fingerprint, request = each[1], each[2]
    if not is_queued(own, fingerprint, request) then
      enqueue(own, request.host, request.rank, request.sequence, fingerprint)
    end
  end
  finish()
  many('ZADD', own.key .. ':waiting', waiting)
  many('ZADD', LEASES, leases)
  return cursor
end

-- -- lanes

local function repair_lanes()
  local in_flight, numbers, strays = {}, {}, {}
  for _, member in ipairs(call('ZRANGE', LEASES, 0, -1)) do
    if #member == 24 then
      local run, host, fingerprint = read(LEASE_MEMBER, member)
      local request = run == own.number and read_record(call('HGET', own.key .. ':req', fingerprint))
      if run == own.number and not (request and request.state == LEASED and request.host == host) then
        strays[#strays + 1] = member
      else
        in_flight[host] = (in_flight[host] or 0) + 1
      end
    end
  end
  many('ZREM', LEASES, strays)
  cursor = scan(own.key .. ':lane', cursor, count, function(number, record)
    numbers[#numbers + 1] = number
    if record == '' then return end
    local is, member = place_of_lane(number, record)
    local key = own.key .. (PLACES[is] or PLACES.o)
    if not call('ZSCORE', key, member) then call('ZADD', key, is == 'o' and read(FRONTED, record) or -1, member) end
  end)
  load_hosts(numbers)
  for _, number in ipairs(numbers) do
    local host, is = hosts[number], in_flight[number] or 0
    if host.in_flight ~= is then
      host.in_flight = is
      change(host)
    end
    touch(own, number, 'stale')
  end
  finish()
  return cursor
end

-- -- counters

local function repair_counters()
  local counts, total, sequence = {}, 0, own.sequence
  for each = READY, DEAD do counts[each] = 0 end
  local at = '0'
  repeat
    at = scan(own.key .. ':req', at, 1000, function(_, record)
      local request = read_record(record)
      total = total + 1
      if request and counts[request.state] then
        counts[request.state] = counts[request.state] + 1
        sequence = math.max(sequence, request.sequence)
      end
    end)
  until at == '0'
  for each = READY, DEAD do own[STATE_NAMES[each]] = counts[each] end
  own.pushed, own.sequence, own.is_changed = math.max(own.pushed, total), sequence, true
  local log = redis.pcall('XINFO', 'STREAM', own.key .. ':items') -- an error if there is none
  for i = 1, #log, 2 do
    if log[i] == 'last-generated-id' then
      own.items = math.max(own.items, tonumber((string.match(log[i + 1], '^%d+'))))
    end
  end
  local incoming = 0
  for _, entry in ipairs(call('LRANGE', STAGES, 0, -1)) do
    local _, _, links = read(STAGE, entry)
    incoming = incoming + links
  end
  own.incoming = math.max(own.incoming, incoming)
  local kinds, strays = {}, {}
  repeat
    at = scan(own.key .. ':dead', at, 1000, function(fingerprint, cause)
      local kind, request = read(TEXT, cause), read_record(call('HGET', own.key .. ':req', fingerprint))
      if request and request.state == DEAD then
        kinds[kind] = (kinds[kind] or 0) + 1
      else
        strays[#strays + 1] = fingerprint
      end
    end)
  until at == '0'
  finish()
  many('HDEL', own.key .. ':dead', strays)
  call('DEL', own.key .. ':kinds')
  for kind, number in pairs(kinds) do call('HSET', own.key .. ':kinds', kind, number) end
  return '0'
end

if act == 'store' then
  repair_store()
  return lost
end
if act == 'requests' then return repair_requests() end
if act == 'lanes' then return repair_lanes() end
return repair_counters()
