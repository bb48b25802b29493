-- Hosts, which all runs of the store share, and lanes: one run's queue for one host.
--
-- Of each run, `open` has the lanes that may be leased from now, by their best request; `later` those that must wait
-- for a time, by that time. Lanes with nothing ready or no room are in neither. A lane may stand in `open` though its
-- host is no longer due or has no room: that is looked at again when it is taken. It never stands too far back.

local HOST = '<dddddi4i4I4c0I4c0'
local HOSTS = PREFIX .. 'host'
local NONE = 0 / 0 -- "not set", for a number; it equals nothing, not even itself
local hosts, changed_hosts, freed_hosts = {}, {}, {}

local function new_host(
  number, name, delay, crawl_delay, learned_delay, blocked_until, ended_at, concurrency, in_flight, block_reason
)
  return {
    number = number, name = name, delay = delay or NONE, crawl_delay = crawl_delay or NONE,
    learned_delay = learned_delay or NONE, blocked_until = blocked_until or 0, ended_at = ended_at or 0,
    concurrency = concurrency or -1, in_flight = in_flight or 0, block_reason = block_reason or '',
    runs = {}, -- those whose lane has requests, or had some lately
    is_changed = false, is_freed = false, is_another = false, -- what this step does to it
  }
end

local function read_host(number, record)
  if not record then return new_host(number, '') end
  local delay, crawl_delay, learned_delay, blocked_until, ended_at, concurrency, in_flight, name, reason, at =
    read(HOST, record)
  local host = new_host(
    number, name, delay, crawl_delay, learned_delay, blocked_until, ended_at, concurrency, in_flight, reason
  )
  local n = 0
  while at <= #record do
    n = n + 1
    host.runs[n], at = read('<I4', record, at)
  end
  return host
end

local function save_host(host)
  local record = pack(
    HOST, host.delay, host.crawl_delay, host.learned_delay, host.blocked_until, host.ended_at, host.concurrency,
    host.in_flight, #host.name, host.name, #host.block_reason, host.block_reason
  )
  for _, number in ipairs(host.runs) do record = record .. pack('<I4', number) end
  return record
end

-- Make `hosts` have these. Number 0 is the host "*": the delay and concurrency of those without their own.
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

-- It is to be written at the end.
local function change(host)
  if not host.is_changed then
    host.is_changed = true
    changed_hosts[#changed_hosts + 1] = host
  end
end

-- The lanes of this host may have to move in all runs: all of them when it is treated in another way; when it only got
-- room, those that stand nowhere.
local function free(host, is_another)
  host.is_another = host.is_another or is_another
  if not host.is_freed then
    host.is_freed = true
    freed_hosts[#freed_hosts + 1] = host
  end
end

-- A lease on a host is over.
local function returned(host, contacted)
  host.in_flight = math.max(0, host.in_flight - 1)
  if contacted then host.ended_at = now end
  change(host)
  free(host)
end

local function touch(run, number)
  if not run.touched[number] then
    run.touched[number] = true
    run.touched_list[#run.touched_list + 1] = number
  end
end

-- The delay in force for a run, and how many requests may be in flight.
local function policy(run, host)
  local all = hosts[0]
  local delay = host.delay
  if delay ~= delay then delay = all.delay end
  if delay ~= delay then delay = run.delay end
  if host.crawl_delay > delay then delay = host.crawl_delay end
  if host.learned_delay > delay then delay = host.learned_delay end
  if delay > 0 then return delay, 1 end
  if host.concurrency >= 0 then return 0, host.concurrency end
  if all.concurrency >= 0 then return 0, all.concurrency end
  return 0, run.concurrency
end

-- From when on a host may be fetched from. The end of a fetch on host 0 is when the store was last found rewound: since
-- then, nobody knows when the others were fetched from.
local function due_at(host, delay)
  if delay <= 0 then return host.blocked_until end
  return math.max(host.blocked_until, math.max(host.ended_at, hosts[0].ended_at) + delay)
end

local function queue_key(run, number) return run.key .. ':q:' .. number end

local function has_lane(host, run)
  for i, number in ipairs(host.runs) do
    if number == run.number then return i end
  end
end

-- A request is ready, and stands in the queue of its host when the step is over.
local function enqueue(run, number, rank, sequence, fingerprint)
  local queue, host = run.queues[number], hosts[number]
  if not queue then
    queue = {rank = rank, sequence = sequence}
    run.queues[number] = queue
    touch(run, number)
    if not has_lane(host, run) then
      queue.is_first = true
      host.runs[#host.runs + 1] = run.number
      change(host)
    end
  elseif rank < queue.rank or (rank == queue.rank and sequence < queue.sequence) then
    queue.rank, queue.sequence = rank, sequence
  end
  queue[#queue + 1] = rank
  queue[#queue + 1] = pack('>I8', sequence) .. fingerprint
end

local function save_queues(run)
  for number, queue in pairs(run.queues) do many('ZADD', queue_key(run, number), queue) end
  for number, count in pairs(run.taken) do call('ZREMRANGEBYRANK', queue_key(run, number), 0, count - 1) end
end

-- The key of a lane's best request: rank and sequence number, or nothing. `stood` is where the lane stood.
local function best_of(run, number, stood)
  local queue, next_one = run.queues[number], run.next_ones[number]
  if next_one then return next_one.rank, next_one.sequence end
  if queue and queue.is_first then return queue.rank, queue.sequence end
  if queue and not run.taken[number] and #stood > 1 then
    local sequence, rank = read('>I8d', stood, 2)
    if rank < queue.rank or (rank == queue.rank and sequence < queue.sequence) then return rank, sequence end
    return queue.rank, queue.sequence
  end
  local best = call('ZRANGE', queue_key(run, number), 0, 0, 'WITHSCORES')
  if best[1] then return tonumber(best[2]), (read('>I8', best[1])) end
end

-- Where a lane belongs: '' for nowhere, 'l' and when, or 'o' and its best request. Its queue is as it will be.
local function belongs(run, host, stood)
  local index = has_lane(host, run)
  if not index then return '' end
  local delay, limit = policy(run, host)
  if host.in_flight >= limit then return '' end
  local due = due_at(host, delay)
  if due > now then return 'l', due end
  local rank, sequence = best_of(run, host.number, stood)
  if rank then return 'o' .. pack('>I8d', sequence, rank), rank end
  table.remove(host.runs, index)
  change(host)
  return ''
end

local function open_member(place, number) return sub(place, 2, 9) .. pack('>I4', number) end

-- Put the touched lanes of a run where they belong.
local function place(run)
  if #run.touched_list == 0 then return end
  local key, missing = run.key .. ':lane', {}
  for _, number in ipairs(run.touched_list) do
    if run.lanes[number] == nil then missing[#missing + 1] = number end
  end
  local found = fetch(key, missing)
  for i, number in ipairs(missing) do run.lanes[number] = found[i] end
  local open, not_open, later, not_later, lanes = {}, {}, {}, {}, {}
  for _, number in ipairs(run.touched_list) do
    local host, stood = hosts[number], run.lanes[number]
    local was = stood or ''
    if was == '' or host.is_another or run.queues[number] or run.taken[number] or run.touched[number] == 'stale' then
      local is, score = belongs(run, host, was)
      local old, new = sub(was, 1, 1), sub(is, 1, 1)
      if is ~= was then
        if old == 'o' then not_open[#not_open + 1] = open_member(was, number) end
        if old == 'l' and new ~= 'l' then not_later[#not_later + 1] = number end
        if new == 'o' then
          open[#open + 1] = score
          open[#open + 1] = open_member(is, number)
        end
      end
      if new == 'l' then
        later[#later + 1] = score
        later[#later + 1] = number
      end
      if is ~= stood then
        run.lanes[number] = is
        lanes[#lanes + 1] = number
        lanes[#lanes + 1] = is
      end
    end
  end
  many('ZREM', run.key .. ':open', not_open)
  many('ZADD', run.key .. ':open', open)
  many('ZREM', run.key .. ':later', not_later)
  many('ZADD', run.key .. ':later', later)
  many('HSET', key, lanes)
end

-- Let the lanes of hosts that got room be looked at, in all runs.
local function touch_freed()
  for _, host in ipairs(freed_hosts) do
    for i = #host.runs, 1, -1 do
      local run = run_of(host.runs[i])
      if run then
        touch(run, host.number)
      else
        table.remove(host.runs, i)
        change(host)
      end
    end
  end
end

local function save_hosts()
  local fields = {}
  for _, host in ipairs(changed_hosts) do
    fields[#fields + 1] = host.number
    fields[#fields + 1] = save_host(host)
    host.is_changed = false
  end
  many('HSET', HOSTS, fields)
  for _, host in ipairs(freed_hosts) do host.is_freed, host.is_another = false, false end
  changed_hosts, freed_hosts = {}, {}
end

-- Change what was collected.
local function finish()
  for _, run in pairs(runs) do
    if run then
      many('HSET', run.key .. ':req', run.records)
      save_queues(run)
    end
  end
  touch_freed()
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
end
