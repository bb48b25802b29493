-- Hosts, which all runs of the store share, and lanes. A lane is the queue of one run for one host.
--
-- Each run has three sorted sets of lanes: `open` lanes may be leased from, by their best request; `later` lanes wait, by
-- due time; `full` lanes have a host with too many requests in flight. Empty lanes are in none. A lane may be in `open`
-- although its host is not due: a lease checks the host again. It is never in `later` or `full` for too long.
--
-- When a request on a host ends, only the lane of the same run is moved, as there may be thousands of runs. Other runs
-- check their `full` lanes when they lease. To check only when something changed, ended requests are counted for the
-- store (`freed`) and for each run; the difference is what other runs freed. A lane in `full` has that difference at its
-- last check as score. Lanes with the lowest score are checked first, so none starves.

local HOSTS = PREFIX .. 'host'
local QUEUED, OPEN_LANE, BEST = '>I8c16', '>I8I4', '>I8d' -- sequence and fingerprint, host, or rank: sorted as strings
local NONE = 0 / 0 -- NaN for "not set"; it is not equal to itself
local hosts, changed_hosts = {}, {}

local function new_host(
  number, name, delay, crawl_delay, learned_delay, blocked_until, ended_at, concurrency, in_flight, block_reason
)
  return {
    number = number, name = name, delay = delay or NONE, crawl_delay = crawl_delay or NONE,
    learned_delay = learned_delay or NONE, blocked_until = blocked_until or 0, ended_at = ended_at or 0,
    concurrency = concurrency or -1, in_flight = in_flight or 0, block_reason = block_reason or '',
    is_changed = false,
  }
end

local function read_host(number, record)
  if not record then return new_host(number, '') end
  local delay, crawl_delay, learned_delay, blocked_until, ended_at, concurrency, in_flight, name, reason =
    read(HOST, record)
  return new_host(
    number, name, delay, crawl_delay, learned_delay, blocked_until, ended_at, concurrency, in_flight, reason
  )
end

local function save_host(host)
  return pack(
    HOST, host.delay, host.crawl_delay, host.learned_delay, host.blocked_until, host.ended_at, host.concurrency,
    host.in_flight, #host.name, host.name, #host.block_reason, host.block_reason
  )
end

-- Load these hosts into `hosts`. Number 0 is the host "*": the defaults of all hosts. Its `ended_at` is the time of the
-- last rewind of the store: nobody knows when other hosts were contacted before it.
local function load_hosts(numbers)
  local missing = {}
  if not hosts[0] then
    hosts[0] = true
    missing[1] = 0
  end
  for _, number in ipairs(numbers) do
    if not hosts[number] then
      hosts[number] = true
      missing[#missing + 1] = number
    end
  end
  local records = fetch(HOSTS, missing)
  for i, number in ipairs(missing) do hosts[number] = read_host(number, records[i]) end
end

-- Mark a host to be written at the end.
local function change(host)
  if not host.is_changed then
    host.is_changed = true
    changed_hosts[#changed_hosts + 1] = host
  end
end

-- Mark a lane that may have to move: if it is empty or full, or wherever it is if `stale`.
local function touch(run, number, stale)
  if not run.touched[number] then run.touched_list[#run.touched_list + 1] = number end
  run.touched[number] = stale or run.touched[number] or 'freed'
end

-- Count an ended lease of a run; nil: of a deleted run.
local function end_lease(run, host, contacted)
  host.in_flight = math.max(0, host.in_flight - 1)
  if contacted then host.ended_at = now end
  change(host)
  state.freed, state.is_changed = state.freed + 1, true
  if run then
    run.freed, run.is_changed = run.freed + 1, true
    touch(run, host.number)
  end
end

local function queue_key(run, number) return run.key .. ':q:' .. number end

-- Add a ready request to the queue of its host at the end of the script.
local function enqueue(run, number, rank, sequence, fingerprint)
  local queue = run.queues[number]
  if not queue then
    queue = {rank = rank, sequence = sequence}
    run.queues[number] = queue
    touch(run, number)
  elseif rank < queue.rank or (rank == queue.rank and sequence < queue.sequence) then
    queue.rank, queue.sequence = rank, sequence
  end
  queue[#queue + 1] = rank
  queue[#queue + 1] = pack(QUEUED, sequence, fingerprint)
end

local function save_queues(run)
  for number, queue in pairs(run.queues) do many('ZADD', queue_key(run, number), queue) end
  for number, count in pairs(run.taken) do call('ZREMRANGEBYRANK', queue_key(run, number), 0, count - 1) end
end

-- Rank and sequence number of a lane's best request, or nothing. `stored` is the old place of the lane, or false.
local function best_of(run, number, stored)
  local queue, next_one = run.queues[number], run.next_ones[number]
  if next_one then return next_one.rank, next_one.sequence end
  if queue and not stored then return queue.rank, queue.sequence end -- the lane is new
  if queue and not run.taken[number] and sub(stored, 1, 1) == 'o' then
    local sequence, rank = read(BEST, stored, 2)
    if rank < queue.rank or (rank == queue.rank and sequence < queue.sequence) then return rank, sequence end
    return queue.rank, queue.sequence
  end
  local best = call('ZRANGE', queue_key(run, number), 0, 0, 'WITHSCORES')
  if best[1] then return tonumber(best[2]), (read(QUEUED, best[1])) end
end

-- How many requests of other runs ended.
local function freed_by_others(run) return state.freed - run.freed end

-- The place of a lane: '' for empty, 'f' full, 'l' later, 'o' open with its best request; and its score there. Its queue
-- is up to date.
local function place_of(run, host, stored)
  local delay, limit = policy(host, hosts[0], run)
  local due = due_at(host, hosts[0], delay)
  if host.in_flight < limit and due <= now then
    local rank, sequence = best_of(run, host.number, stored)
    if not rank then return '' end
    return 'o' .. pack(BEST, sequence, rank), rank
  end
  if call('EXISTS', queue_key(run, host.number)) == 0 then return '' end
  if host.in_flight >= limit then return 'f', freed_by_others(run) end
  return 'l', due
end

local SETS = {o = ':open', l = ':later', f = ':full'}

-- The member of the sorted set of a place.
local function member_at(place, number)
  if sub(place, 1, 1) ~= 'o' then return number end
  return pack(OPEN_LANE, (read(BEST, place, 2)), number)
end

-- Move the touched lanes of a run to where they belong.
local function place(run)
  if #run.touched_list == 0 then return end
  local key, missing = run.key .. ':lane', {}
  for _, number in ipairs(run.touched_list) do
    if run.lanes[number] == nil then missing[#missing + 1] = number end
  end
  local found = fetch(key, missing)
  for i, number in ipairs(missing) do run.lanes[number] = found[i] end
  local added, removed, lanes = {o = {}, l = {}, f = {}}, {o = {}, l = {}, f = {}}, {}
  for _, number in ipairs(run.touched_list) do
    local stored = run.lanes[number]
    local was = stored or ''
    local may_move = was == '' or was == 'f' or run.queues[number] or run.taken[number]
    if may_move or run.touched[number] == 'stale' then
      local is, score = place_of(run, hosts[number], stored)
      local from, to = removed[sub(was, 1, 1)], added[sub(is, 1, 1)]
      if from and is ~= was then from[#from + 1] = member_at(was, number) end
      if to and (is ~= was or to ~= added.o) then
        to[#to + 1] = score
        to[#to + 1] = member_at(is, number)
      end
      if is ~= stored and (stored or is ~= '') then
        run.lanes[number] = is
        lanes[#lanes + 1] = number
        lanes[#lanes + 1] = is
      end
    end
  end
  for part, name in pairs(SETS) do
    many('ZREM', run.key .. name, removed[part])
    many('ZADD', run.key .. name, added[part])
  end
  many('HSET', key, lanes)
end

local function save_hosts()
  local fields = {}
  for _, host in ipairs(changed_hosts) do
    fields[#fields + 1] = host.number
    fields[#fields + 1] = save_host(host)
    host.is_changed = false
  end
  many('HSET', HOSTS, fields)
  changed_hosts = {}
end

-- Write the collected changes.
local function finish()
  for _, run in pairs(runs) do
    if run then
      many('HSET', run.key .. ':req', run.records)
      save_queues(run)
    end
  end
  for _, run in pairs(runs) do
    if run then
      place(run)
      save_notes(run)
      save_deaths(run)
      save_ledger(run)
      collect(run)
    end
  end
  save_hosts()
  save_state()
end

-- Let every host wait one delay from now.
local function let_all_wait()
  load_hosts({})
  hosts[0].ended_at = now
  change(hosts[0])
  finish()
end
