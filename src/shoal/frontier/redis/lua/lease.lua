-- Lease the best requests whose host is due. ARGV:
--   limit; ttl; time after which the client does not wait any more, or ''; 1 if the leases are begun, 0 if they are sent
--   last 6 bytes of the tokens (the first 2 are the number of the lease in this call)
--   client id if it may repeat this call, or ''; nonce of the call; part of the call
--   if under a slot of a cluster: slot and epoch
-- Returns the seconds until there may be more ('' if time alone brings nothing), the server's time, learned delays of
-- hosts, fingerprints, records, how many records were missing, and after how many seconds to poll again. Returns only
-- 'late' and the time if the client does not wait any more.

local limit, ttl, begun = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[8]
local base, client, round, part = ARGV[9], ARGV[10], ARGV[11], tonumber(ARGV[12])
local slot, epoch = ARGV[13], tonumber(ARGV[14])
local FULL_AT_ONCE = 200
local AT_ONCE = 1000 -- due leases, requests or lanes; the next call continues

-- -- due leases, requests and lanes

-- A request whose record cannot be read is dead, so that it is reported and blocks nobody.
local function bury(run, fingerprint, state, sequence, host, rank)
  local reason = 'its record in Redis is missing or incomplete: another program changed it'
  local rest = pack(FIXED, rank, string.rep('\0', FINGERPRINT_SIZE))
  local request = {
    state = state, attempts = 0, status = 0, items = 0, at = real, sequence = sequence, host = host, worker = 0,
    rest = rest,
  }
  move(run, fingerprint, request, DEAD)
  die(run, fingerprint, UNREADABLE, reason)
  note(run, fingerprint, UNREADABLE, reason, 0)
  save_record(run, fingerprint, request)
end

-- Requeue expired leases of all runs: leases of another run must not block a host for this one.
local function requeue_expired()
  local members = call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, AT_ONCE)
  if #members == 0 then return false end
  local by_run, numbers = {}, {}
  for i, member in ipairs(members) do
    local number, host, fingerprint = read(LEASE_MEMBER, member)
    numbers[i] = host
    by_run[number] = by_run[number] or {hosts = {}, fingerprints = {}}
    table.insert(by_run[number].hosts, host)
    table.insert(by_run[number].fingerprints, fingerprint)
  end
  load_hosts(numbers)
  for number, lost in pairs(by_run) do
    local run = run_of(number)
    local records = run and fetch(run.key .. ':req', lost.fingerprints) or {}
    local sent = run and fetch(run.key .. ':sent', lost.fingerprints) or {}
    for i, fingerprint in ipairs(lost.fingerprints) do
      local host, request = hosts[lost.hosts[i]], read_record(records[i])
      local contacted = true
      if run and not request then
        bury(run, fingerprint, LEASED, 0, host.number, 0)
      elseif run and request.state == LEASED then
        request.host = host.number
        contacted = lose(run, fingerprint, request, is_unbegun(request, sent[i]))
      end
      end_lease(run, host, contacted)
    end
    if run then forget(run, lost.fingerprints) end
  end
  many('ZREM', LEASES, members)
  return true
end

-- Make requests ready that have waited for their retry.
local function wake()
  local key = own.key .. ':waiting'
  local fingerprints = call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, AT_ONCE)
  if #fingerprints == 0 then return false end
  local records, requests, numbers = fetch(own.key .. ':req', fingerprints), {}, {}
  for i in ipairs(fingerprints) do
    requests[i] = read_record(records[i])
    if requests[i] then numbers[#numbers + 1] = requests[i].host end
  end
  load_hosts(numbers)
  for i, fingerprint in ipairs(fingerprints) do
    local request = requests[i]
    if not request then
      bury(own, fingerprint, WAITING, 0, 0, 0)
    elseif request.state == WAITING then
      move(own, fingerprint, request, READY)
      save_record(own, fingerprint, request)
    end
  end
  many('ZREM', key, fingerprints)
  return true
end

-- Check `later` lanes that are due.
local function open_lanes()
  local due = call('ZRANGEBYSCORE', own.key .. ':later', '-inf', now, 'LIMIT', 0, AT_ONCE)
  for i, number in ipairs(due) do
    due[i] = tonumber(number)
    touch(own, due[i], 'stale')
  end
  load_hosts(due)
  many('ZREM', own.key .. ':later', due)
  return #due > 0
end

-- Check `full` lanes if other runs have freed hosts since their last check.
local function check_full()
  local key, others = own.key .. ':full', freed_by_others(own)
  local numbers = call('ZRANGEBYSCORE', key, '-inf', string.format('(%.0f', others), 'LIMIT', 0, FULL_AT_ONCE)
  for i, number in ipairs(numbers) do
    numbers[i] = tonumber(number)
    touch(own, numbers[i])
  end
  load_hosts(numbers)
  return #numbers > 0
end

-- -- choosing: a heap of lanes, by their next request

local heap, size, in_play = {}, 0, {}

local function before(a, b) return a.rank < b.rank or (a.rank == b.rank and a.sequence < b.sequence) end

local function sink()
  local i, lane = 1, heap[1]
  local rank, sequence = lane.rank, lane.sequence
  while 2 * i <= size do
    local child = 2 * i
    local one, other = heap[child], heap[child + 1]
    if other and (other.rank < one.rank or (other.rank == one.rank and other.sequence < one.sequence)) then
      child, one = child + 1, other
    end
    if rank < one.rank or (rank == one.rank and sequence < one.sequence) then break end
    heap[i] = one
    i = child
  end
  heap[i] = lane
end

local function enter(lane)
  size = size + 1
  local i = size
  while i > 1 do
    local parent = math.floor(i / 2)
    if not before(lane, heap[parent]) then break end
    heap[i] = heap[parent]
    i = parent
  end
  heap[i] = lane
end

local function leave()
  heap[1] = heap[size]
  heap[size] = nil
  size = size - 1
  if size > 0 then sink() end
end

-- Advance a lane to its next request; false if its host is full or it has no more. It reads ahead in growing steps.
local function advance(lane)
  if lane.count >= lane.room then return false end
  if lane.at > #lane.ahead then
    local last = math.min(lane.room, lane.count + lane.step) - 1
    lane.ahead = call('ZRANGE', queue_key(own, lane.number), lane.count, last, 'WITHSCORES')
    lane.at, lane.step = 1, lane.step * 4
    if #lane.ahead == 0 then return false end
  end
  lane.sequence, lane.fingerprint = read(QUEUED, lane.ahead[lane.at])
  lane.rank = tonumber(lane.ahead[lane.at + 1])
  lane.at = lane.at + 2
  return true
end

local NOTHING = {}
local listed, listed_at, listed_to, portion = {}, 0, 0, 8
local share = 2 -- requests expected from a lane

-- The next lane of `open`, or nil. Lanes and their hosts are read in growing portions.
local function next_open()
  if listed_at == #listed and portion then
    local members = call('ZRANGE', own.key .. ':open', listed_to, listed_to + portion - 1, 'WITHSCORES')
    listed, listed_at, listed_to = {}, 0, listed_to + portion
    local numbers = {}
    for i = 1, #members / 2 do
      local sequence, number = read(OPEN_LANE, members[2 * i - 1])
      numbers[i] = number
      listed[i] = {
        number = number, rank = tonumber(members[2 * i]), sequence = sequence, fingerprint = '',
        room = 0, count = 0, ahead = NOTHING, at = 1, step = share,
      }
    end
    load_hosts(numbers)
    portion = #listed == portion and math.min(1000, portion * 2)
  end
  listed_at = listed_at + 1
  return listed[listed_at]
end

-- Add a lane to the heap, unless its host is not due any more or is full: another run may have leased from it.
local function try(lane)
  if in_play[lane.number] then return end
  in_play[lane.number] = true
  local host = hosts[lane.number]
  local delay, most = policy(host, hosts[0], own)
  lane.room = most - host.in_flight
  if due_at(host, hosts[0], delay) <= now and advance(lane) then
    enter(lane)
  else
    touch(own, lane.number, 'stale')
  end
end

-- The best requests: fingerprints, hosts, sequence numbers and ranks.
local function choose()
  local fingerprints, numbers, sequences, ranks, n = {}, {}, {}, {}, 0
  local lanes = call('ZCARD', own.key .. ':open')
  if lanes > 0 and lanes < limit then share = 2 + math.floor(limit / lanes) end
  local candidate = next_open()
  while n < limit do
    local best = heap[1]
    if candidate and not (best and before(best, candidate)) then
      try(candidate)
      candidate = next_open()
    elseif best then
      n = n + 1
      fingerprints[n], numbers[n], sequences[n], ranks[n] = best.fingerprint, best.number, best.sequence, best.rank
      best.count = best.count + 1
      if advance(best) then sink() else leave() end
      own.taken[best.number] = best.count
    else
      break
    end
  end
  for _, lane in ipairs(heap) do
    if lane.count > 0 then own.next_ones[lane.number] = lane end
  end
  return fingerprints, numbers, sequences, ranks
end

local buried = 0

local function token_of(i) return pack('<I2', i) .. base end

-- Store an entry for each of these leases.
local function remember(key, fingerprints, entry_of)
  local entries = {}
  for i, fingerprint in ipairs(fingerprints) do
    entries[2 * i - 1], entries[2 * i] = fingerprint, entry_of(token_of(i))
  end
  many('HSET', own.key .. key, entries)
end

-- -- repeated calls: the last grant of each client is kept until its leases expire

local GRANT = '<I2I2c0c6' -- part and nonce of the call, last bytes of its tokens; then the fingerprints
local grant_key = PREFIX .. 'grant:' .. client

local function save_grant(fingerprints)
  local grant = pack(GRANT, part, #round, round, base) .. table.concat(fingerprints)
  call('SET', grant_key, grant, 'PX', string.format('%.0f', math.max(1, math.ceil(ttl * 1000))))
end

-- The leases of this call that are still held, if it is a repeat; else nil.
local function granted()
  local grant = client ~= '' and call('GET', grant_key)
  if not grant then return nil end
  local taken, of, last_bytes, at = read(GRANT, grant)
  if of ~= round or taken < part then return nil end
  local fingerprints, leased, answer, members = {}, {}, {}, {}
  for i = 1, (#grant - at + 1) / FINGERPRINT_SIZE do fingerprints[i], at = read('c16', grant, at) end
  base = last_bytes
  local records, until_when = fetch(own.key .. ':req', fingerprints), string.format('%.17g', now + ttl)
  for i, fingerprint in ipairs(fingerprints) do
    local request = read_record(records[i])
    if request and request.state == LEASED and request.token == token_of(i) then
      leased[#leased + 1], answer[#answer + 1] = fingerprint, records[i]
      members[#members + 1] = until_when
      members[#members + 1] = lease_member(own, request.host, fingerprint)
      in_play[request.host] = true
    end
  end
  local numbers = {}
  for number in pairs(in_play) do numbers[#numbers + 1] = number end
  load_hosts(numbers)
  many('ZADD', LEASES, members)
  return leased, answer
end

-- Lease the chosen requests. Returns fingerprints and records.
local function take(fingerprints, numbers, sequences, ranks)
  local found, records = fetch(own.key .. ':req', fingerprints), own.records
  local leased, answer, members, prefixes, n = {}, {}, {}, {}, 0
  local until_when = string.format('%.17g', now + ttl)
  local worker = #fingerprints > 0 and slot and holder_number(slot) or 0
  for number, count in pairs(own.taken) do
    touch(own, number)
    hosts[number].in_flight = hosts[number].in_flight + count
    change(hosts[number])
    prefixes[number] = lease_member(own, number, '')
  end
  for i, fingerprint in ipairs(fingerprints) do
    local number, record = numbers[i], found[i]
    if not record or #record < MIN_SIZE then
      hosts[number].in_flight = hosts[number].in_flight - 1
      bury(own, fingerprint, READY, sequences[i], number, ranks[i])
      buried = buried + 1
    else
      local _, attempts, status, items = read(PROGRESS, record)
      n = n + 1
      attempts = math.min(attempts + 1, MAX_ATTEMPTS)
      local head = pack(HEAD, LEASED, attempts, status, items, real, sequences[i], number, token_of(n), worker)
      record = head .. sub(record, HEAD_SIZE + 1)
      leased[n], answer[n] = fingerprint, record
      members[2 * n - 1], members[2 * n] = until_when, prefixes[number] .. fingerprint
    end
  end
  local written = #records
  for i = 1, n do
    records[written + 2 * i - 1], records[written + 2 * i] = leased[i], answer[i]
  end
  own.ready, own.leased = own.ready - n, own.leased + n
  own.is_changed = own.is_changed or n > 0
  finish()
  many('ZADD', LEASES, members)
  if slot then
    local holder = sub(slot_entry(NO_TOKEN, epoch, slot), TOKEN_SIZE + 1)
    remember(':slot', leased, function(token) return token .. holder end)
  end
  if begun == '0' then remember(':sent', leased, function(token) return token end) end
  if client ~= '' and n > 0 then save_grant(leased) end
  return leased, answer
end

-- -- idle clients: each one gets the next free moment to poll, so that all together poll at most this often

local POLLS_PER_SECOND, MAX_PAUSE, MIN_PAUSE = 300, 10, 0.05

local function pause()
  if limit == 0 then return '0' end
  local key = PREFIX .. 'polls'
  local moment = math.min(math.max(now, tonumber(call('GET', key)) or 0), now + MAX_PAUSE)
  call('SET', key, string.format('%.6f', moment + 1 / POLLS_PER_SECOND), 'PX', 2000 * MAX_PAUSE)
  return moment - now < MIN_PAUSE and '0' or string.format('%.3f', moment - now)
end

-- -- the call

-- The client does not wait any more: nobody would work on the leases.
local server_time = real - tonumber(ARGV[2])
if ARGV[7] ~= '' and server_time > tonumber(ARGV[7]) then return {'late', string.format('%.6f', server_time)} end

local refusal = slot and fenced(slot, epoch)
if refusal then return refusal end

move_staged()
local leased, answer = granted()
if not leased then
  local requeued, woke = requeue_expired(), wake()
  local opened, checked = open_lanes(), check_full()
  if requeued or woke or opened or checked then finish() end
  if HALTED[own.state] then
    return {'', string.format('%.6f', server_time), '', '', {}, 0, pause()}
  end
  leased, answer = take(choose())
end

local soonest = math.huge
for _, key in ipairs({LEASES, own.key .. ':waiting', own.key .. ':later'}) do
  local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
  local moment = tonumber(first[2])
  if moment and moment < soonest then soonest = moment end
end
local learned = {}
for number in pairs(in_play) do
  local host = hosts[number]
  if host.learned_delay > 0 then learned[#learned + 1] = pack(LEARNED, number, host.learned_delay) end
end
local wait = soonest < math.huge and string.format('%.6f', math.max(0, soonest - now)) or ''
local poll_after = #leased == 0 and pause() or '0'
return {
  wait, string.format('%.6f', server_time), table.concat(learned), table.concat(leased), answer, buried, poll_after,
}
