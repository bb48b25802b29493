-- Prepended to every script, with hosts.lua, lanes.lua, requests.lua, slots.lua and stages.lua: the store's clock and its
-- runs.
--
-- Names in capitals that no script defines, and functions such as `policy`, come from shoal/frontier/redis/records.py.
--
-- Redis runs a script atomically, but does not undo it after an error. So a script reads first, collects its changes, and
-- writes them at its end, mostly in `finish`. If Redis refuses writes (no memory, no disk, a replica), it refuses the first
-- one.
--
-- Scripts build the names of keys. All keys of a store have the same hash tag, so Redis Cluster keeps them in one slot,
-- that of KEYS[1].
--
-- ARGV: prefix, seconds to add to the clock (for tests), number and name of the run or '', options for a run that has none
-- (of this client, or the defaults) and perhaps a receipt; then the arguments of the script.
--
-- Tokens have 64 bits, more than a number of Lua: they are strings of 8 bytes, lowest byte first.

local call, pack, read, sub = redis.call, struct.pack, struct.unpack, string.sub
local PREFIX, OPTIONS, RECEIPT = ARGV[1], sub(ARGV[4], 1, OPTIONS_SIZE), sub(ARGV[4], OPTIONS_SIZE + 1)
local NO_TOKEN = string.rep('\0', TOKEN_SIZE)
local MAX_ARGUMENTS = 4000 -- of one call; the stack of Lua ends at 8000

-- All runs share the clock. `real` is the server's clock, for times that people read. `now` never goes back: it adds all
-- steps back of the server's clock. For that, scripts save the last time that they have seen, at most every 0.1 seconds.
local SEEN_EVERY = 0.1
local clock = call('TIME')
local shared = call('HMGET', PREFIX .. 'store', 'seen', 'skew', 'freed', 'leased_by')
local state = {seen = tonumber(shared[1]) or 0, skew = tonumber(shared[2]) or 0, freed = tonumber(shared[3]) or 0}
local real = tonumber(clock[1]) + tonumber(clock[2]) / 1000000 + tonumber(ARGV[2])
if real < state.seen then state.skew = state.skew + state.seen - real end
if real < state.seen or real >= state.seen + SEEN_EVERY then state.seen, state.is_changed = real, true end
local now = real + state.skew

-- The functions of turns.lua, if runs share hosts and the script needs them. Without them a lane may be opened too early; a
-- lease checks it.
local turns

local function save_state()
  if not state.is_changed then return end
  local seen, skew = string.format('%.6f', state.seen), string.format('%.6f', state.skew)
  call('HSET', PREFIX .. 'store', 'seen', seen, 'skew', skew, 'freed', string.format('%.0f', state.freed))
  state.is_changed = false
end

-- Call a command on one key with any number of arguments.
local function many(command, key, arguments)
  for first = 1, #arguments, MAX_ARGUMENTS do
    call(command, key, unpack(arguments, first, math.min(first + MAX_ARGUMENTS - 1, #arguments)))
  end
end

-- Read any number of fields of a hash; false for a missing one.
local function fetch(key, fields)
  if #fields == 0 then return {} end
  if #fields <= MAX_ARGUMENTS then return call('HMGET', key, unpack(fields)) end
  local found = {}
  for first = 1, #fields, MAX_ARGUMENTS do
    local some = call('HMGET', key, unpack(fields, first, math.min(first + MAX_ARGUMENTS - 1, #fields)))
    for i = 1, #some do found[first + i - 1] = some[i] end
  end
  return found
end

-- Visit about `count` fields of a hash, from a cursor on. Returns the next cursor ('0' at the end).
local function scan(key, cursor, count, visit)
  local left = tonumber(count)
  repeat
    local page = call('HSCAN', key, cursor, 'COUNT', math.min(left, 1000))
    cursor = page[1]
    for i = 1, #page[2], 2 do visit(page[2][i], page[2][i + 1]) end
    left = left - #page[2] / 2
  until cursor == '0' or left < 1
  return cursor
end

-- -- runs

local COUNTERS = {'sequence', 'freed', unpack(STATS)}
local LEDGER = '<' .. string.rep('d', #COUNTERS) -- all counters in one field: Redis searches a small hash field by field
local runs, own = {}, nil

-- Start to collect the changes of a run.
local function collect(run)
  run.is_changed = false -- whether its counters changed
  run.records = {} -- requests to write: fingerprint, record, ...
  run.queued = {} -- by host: requests that become ready, as rank, sequence, fingerprint, ...
  run.rests = {} -- by host: what is left of the lane after a lease
  run.unlisted, run.unsorted = {}, {} -- by host: how many requests leave its list and its sorted set
  run.old_sequence = run.sequence -- of the last request that is in the store
  run.touched, run.touched_list = {}, {} -- hosts whose lane may have to move
  run.notes, run.noted = {}, {} -- events by fingerprint
  run.causes, run.kinds = {}, {} -- dead requests: fingerprint, cause, ...; changes of the counts by kind
  run.refused = {} -- links that found the queue full, as rank, member, ...
end

-- A run by its number, as before this script; nil if it was deleted.
local function run_of(number)
  local run = runs[number]
  if run == nil then
    run = false
    local key = PREFIX .. 'run:' .. number
    local found = call('HMGET', key, 'run_id', 'state', 'options', 'counters')
    if found[1] then
      local counters = found[4] and {read(string.sub(LEDGER, 1, 1 + #found[4] / 8), found[4])} or {}
      run = {number = number, key = key, name = found[1], state = found[2], lanes = {}, holders = {}}
      -- Options that another program wrote must not stop the runs that share a host with this one.
      run.options = found[3] and #found[3] == OPTIONS_SIZE and found[3] or nil
      run.packed_number = pack('>I4', number)
      -- Counters that an earlier version stored end before the newest ones.
      for i = 1, #COUNTERS do run[COUNTERS[i]] = i <= (found[4] and #found[4] / 8 or 0) and counters[i] or 0 end
      collect(run)
      run.delay, run.concurrency, run.max_attempts, run.link_limit = read(RUN_OPTIONS, run.options or OPTIONS)
    end
    runs[number] = run
  end
  return run or nil
end

-- Create a run unless there is one of that name. Its arguments begin at this index: the format of the store, run_id, then the
-- other fields and values. Returns 0 if it exists.
local function create_run(first)
  local name = ARGV[first + 1]
  if call('HEXISTS', PREFIX .. 'runs', name) == 1 then return 0 end
  -- Redis stores a small sorted set as a list, which is slow to search. One long member makes it a tree from the start.
  call('ZADD', PREFIX .. 'lease', 'inf', string.rep('\0', 65))
  local number = call('HINCRBY', PREFIX .. 'store', 'run', 1)
  call('HSETNX', PREFIX .. 'store', 'format', ARGV[first]) -- a newer version may have raised it
  call('HSET', PREFIX .. 'runs', name, number)
  call('HSET', PREFIX .. 'run:' .. number, 'run_id', name, unpack(ARGV, first + 2))
  return 1
end

-- -- events

-- The name of a worker or a slot of a cluster by its number in records; '' for 0.
local function holder_name(run, number)
  if number == 0 then return '' end
  run.holders[number] = run.holders[number] or call('HGET', run.key .. ':holder', '#' .. number) or ''
  return run.holders[number]
end

-- Add an event to the history of a request. `worker`: the number of the holder of the lease that it is about, or 0.
local function note(run, fingerprint, what, detail, worker)
  local name = holder_name(run, worker)
  if not run.notes[fingerprint] then
    run.notes[fingerprint] = ''
    run.noted[#run.noted + 1] = fingerprint
  end
  run.notes[fingerprint] = run.notes[fingerprint] .. pack(EVENT, real, #what, what, #detail, detail, #name, name)
end

local function save_notes(run)
  if #run.noted == 0 then return end
  local key, fields = run.key .. ':event', {}
  local before = fetch(key, run.noted)
  for i, fingerprint in ipairs(run.noted) do
    fields[#fields + 1] = fingerprint
    fields[#fields + 1] = (before[i] or '') .. run.notes[fingerprint]
  end
  many('HSET', key, fields)
end

local function save_deaths(run)
  many('HSET', run.key .. ':dead', run.causes)
  many('ZADD', run.key .. ':refused', run.refused)
  for kind, more in pairs(run.kinds) do
    if call('HINCRBY', run.key .. ':kinds', kind, more) <= 0 then call('HDEL', run.key .. ':kinds', kind) end
  end
end

local function save_ledger(run)
  if not run.is_changed then return end
  local counters = {}
  for i = 1, #COUNTERS do counters[i] = run[COUNTERS[i]] end
  local ledger = pack(LEDGER, unpack(counters))
  if run.has_ended then -- and other runs want to know
    call('HSET', run.key, 'counters', ledger, 'called', string.format('%.6f', now))
  else
    call('HSET', run.key, 'counters', ledger)
  end
end

-- The error for a store that went back in time.
local function rewound() return redis.error_reply(REWOUND .. ' a change that the store had acknowledged is missing') end

-- Whether the request of a receipt (fingerprint and token) is done under that token.
local function is_done(receipt)
  local record = call('HGET', own.key .. ':req', lease_fingerprint(receipt))
  return record and string.byte(record) == DONE and record_token(record) == lease_token(receipt)
end

if ARGV[3] ~= '' then
  local number, name = string.match(ARGV[3], '^(%d+) ?(.*)$')
  own = run_of(tonumber(number))
  -- A rewound store may give the number of a lost run to another run.
  if not own or (name ~= '' and name ~= own.name) then return redis.error_reply(NO_RUN .. ' no such run') end
  if RECEIPT ~= '' and not is_done(RECEIPT) then return rewound() end
end
