-- Lease the best requests whose host is due. ARGV:
--   limit; ttl; time at which the client gives up, or ''; 1 if the leases are begun, 0 if they are sent
--   last 6 bytes of the tokens (the first 2 are the number of the lease in this call)
--   client id if it may repeat this call, or ''; nonce of the call; part of the call
--   if under a slot of a cluster: slot and epoch
-- Returns the seconds until there may be more ('' if time alone brings nothing), the server's time, learned delays of
-- hosts, fingerprints, records, how many records were missing, after how many seconds to poll again, and the version of
-- the run's cookies. Returns only 'late' and the time if the client has given up.

local limit, ttl, begun = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[8]
local base, client, round, part = ARGV[9], ARGV[10], ARGV[11], tonumber(ARGV[12])
local slot, epoch = ARGV[13], tonumber(ARGV[14])
local FULL_AT_ONCE = 200
local AT_ONCE = 1000 -- due leases, requests or lanes; the next call continues

-- -- due leases, requests and lanes

-- A request whose record cannot be read is dead, so that it is reported and blocks nobody.
local function bury(run, fingerprint, state, sequence, host, rank)
  local reason = 'its record in Redis is missing or incomplete: another program changed it'
  local rest = rank == 0 and pack(HAS, 0) or pack(HAS, HAS_RANK) .. pack(RANK, rank)
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
      bury(own, fingerprint, WAITING, 0, ALL_HOSTS, 0)
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
  for _, number in ipairs(due) do touch(own, number, 'stale') end
  load_hosts(due)
  if turns then turns.ask_for_all(due) end
  many('ZREM', own.key .. ':later', due)
  return #due > 0
end

-- Check `full` lanes if other runs have freed hosts since their last check.
local function check_full()
  local key, others = own.key .. ':full', freed_by_others(own)
  local numbers = call('ZRANGEBYSCORE', key, '-inf', string.format('(%.0f', others), 'LIMIT', 0, FULL_AT_ONCE)
  for _, number in ipairs(numbers) do touch(own, number) end
  load_hosts(numbers)
  if turns then turns.ask_for_all(numbers) end
  return #numbers > 0
end

local buried = 0

local function token_of(i) return pack('<I2', i) .. base end -- as in GRANTED_HEAD

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
local function take(fingerprints, numbers, sequences, ranks, lanes)
  local found, records = fetch(own.key .. ':req', fingerprints), own.records
  local leased, answer, members, n = {}, {}, {}, 0
  local until_when = string.format('%.17g', now + ttl)
  local worker = #fingerprints > 0 and slot and holder_number(slot) or 0
  for _, lane in ipairs(lanes) do
    local host = hosts[lane.number]
    host.in_flight = host.in_flight + lane.count
    change(host)
    touch(own, lane.number)
    shorten(lane)
    if host.is_shared then turns.take(host, lane.count) end
  end
  for i = 1, #fingerprints do
    local fingerprint, number, record = fingerprints[i], numbers[i], found[i]
    if not record or #record < MIN_SIZE then
      hosts[number].in_flight = hosts[number].in_flight - 1
      bury(own, fingerprint, READY, sequences[i], number, ranks[i])
      buried = buried + 1
    else
      local _, status, items, _, _, attempts = read(PROGRESS, record)
      n = n + 1
      attempts = math.min(attempts + 1, MAX_ATTEMPTS)
      local head = pack(GRANTED_HEAD, LEASED, status, items, real, number, attempts, sequences[i], n, base, worker)
      leased[n], answer[n] = fingerprint, head .. sub(record, HEAD_SIZE + 1)
      members[2 * n - 1], members[2 * n] = until_when, lease_member(own, number, fingerprint)
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

-- The client has given up: nobody would work on the leases.
local server_time = real - tonumber(ARGV[2])
if ARGV[7] ~= '' and server_time > tonumber(ARGV[7]) then return {'late', string.format('%.6f', server_time)} end

local refusal = slot and fenced(slot, epoch)
if refusal then return refusal end

local cookies = tonumber(call('GET', own.key .. ':cookies')) or 0
if limit > 0 and not HALTED[own.state] and (leased_by ~= own.number or met_until > 0) then
  define_turns(leased_by ~= own.number or now >= met_until)
end
move_staged()
local leased, answer = granted()
if not leased then
  local requeued, woke = requeue_expired(), wake()
  local opened, checked = open_lanes(), check_full()
  if requeued or woke or opened or checked then finish() end
  if HALTED[own.state] then
    return {'', string.format('%.6f', server_time), '', '', {}, 0, pause(), cookies}
  end
  leased, answer = take(choose(limit))
  if limit > 0 and turns then turns.save(#leased < limit) end
end

local soonest = now + (own.pause or math.huge)
for _, key in ipairs({LEASES, own.key .. ':waiting', own.key .. ':later'}) do
  local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
  local moment = tonumber(first[2])
  if moment and moment < soonest then soonest = moment end
end
local learned = {}
for number in pairs(in_play) do
  local delay = hosts[number].settings.learned_delay
  if delay > 0 then learned[#learned + 1] = pack(LEARNED, number, delay) end
end
local wait = soonest < math.huge and string.format('%.6f', math.max(0, soonest - now)) or ''
local poll_after = #leased == 0 and pause() or '0'
return {
  wait, string.format('%.6f', server_time), table.concat(learned), table.concat(leased), answer, buried, poll_after,
  cookies,
}
