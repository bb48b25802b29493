-- In front of every script, with hosts.lua, requests.lua and slots.lua: the store's clock, its runs, and how a step
-- ends.
--
-- A script is one atomic step, but an error in its middle would leave half of it. So it reads first, collects what is
-- to be changed, and changes it at its end, mostly in `finish`. Redis itself refuses (for want of memory or disk, or
-- because it is a replica) the first change of a script or none.
--
-- Scripts make up the names of keys. All keys of a store begin with the same hash tag, so on a cluster they are in one
-- slot, that of KEYS[1].
--
-- ARGV: prefix, seconds that the clock is ahead (in tests), number and name of the run or '', its options and perhaps a
-- receipt; then what the script itself is given.
--
-- Tokens have 64 bits, more than a number of Lua: they are strings of 8 bytes, the lowest first.

local call, pack, read, sub = redis.call, struct.pack, struct.unpack, string.sub
local PREFIX, OPTIONS, RECEIPT = ARGV[1], sub(ARGV[4], 1, 16), sub(ARGV[4], 17)
local READY, WAITING, LEASED, DONE, DEAD = 0, 1, 2, 3, 4
local NO_TOKEN = string.rep('\0', 8)
local MOST = 4000 -- arguments of one call; the stack of Lua ends at 8000

-- What all runs share. The server's clock may be set back, but `now` never goes back: it is ahead of the clock by all
-- such steps, and only what people see is `real`. That takes the last time that was seen, which is written seldom.
local SEEN_EVERY = 0.1
local clock = call('TIME')
local shared = call('HMGET', PREFIX .. 'store', 'seen', 'skew', 'freed')
local state = {seen = tonumber(shared[1]) or 0, skew = tonumber(shared[2]) or 0, freed = tonumber(shared[3]) or 0}
local real = tonumber(clock[1]) + tonumber(clock[2]) / 1000000 + tonumber(ARGV[2])
if real < state.seen then state.skew = state.skew + state.seen - real end
if real < state.seen or real >= state.seen + SEEN_EVERY then state.seen, state.is_changed = real, true end
local now = real + state.skew

local function save_state()
  if not state.is_changed then return end
  local seen, skew = string.format('%.6f', state.seen), string.format('%.6f', state.skew)
  call('HSET', PREFIX .. 'store', 'seen', seen, 'skew', skew, 'freed', string.format('%.0f', state.freed))
  state.is_changed = false
end

-- A command on one key with any number of arguments.
local function many(command, key, arguments)
  for first = 1, #arguments, MOST do
    call(command, key, unpack(arguments, first, math.min(first + MOST - 1, #arguments)))
  end
end

-- Any number of fields of a hash; false for each that is not there.
local function fetch(key, fields)
  if #fields == 0 then return {} end
  if #fields <= MOST then return call('HMGET', key, unpack(fields)) end
  local found = {}
  for first = 1, #fields, MOST do
    local some = call('HMGET', key, unpack(fields, first, math.min(first + MOST - 1, #fields)))
    for i = 1, #some do found[first + i - 1] = some[i] end
  end
  return found
end

-- -- runs

local COUNTERS = {'pushed', 'ready', 'waiting', 'leased', 'done', 'dead', 'duplicates', 'items', 'sequence', 'rewinds', 'freed', 'incoming'}
local LEDGER = {'run_id', 'state', 'options', unpack(COUNTERS)}
local runs, own = {}, nil

-- Begin to collect what a step does to a run.
local function collect(run)
  run.is_changed = false -- its counters
  run.records = {} -- requests to write: fingerprint, record, ...
  run.queues = {} -- by host: what becomes ready, as rank, member, ...
  run.taken = {} -- by host: how many of the best stop being ready
  run.next_ones = {} -- by host: which one is the best then, if that is known
  run.touched, run.touched_list = {}, {} -- hosts whose lane may have to move
  run.notes, run.noted = {}, {} -- events by fingerprint
  run.causes, run.kinds = {}, {} -- deaths: fingerprint, cause, ...; how many more there are of each kind
end

-- A run by its number, as it is before this step; nil when it was deleted.
local function run_of(number)
  local run = runs[number]
  if run == nil then
    run = false
    local key = PREFIX .. 'run:' .. number
    local ledger = call('HMGET', key, unpack(LEDGER))
    if ledger[1] then
      run = {number = number, key = key, name = ledger[1], state = ledger[2], options = ledger[3], lanes = {}}
      collect(run)
      for i = 1, #COUNTERS do run[COUNTERS[i]] = tonumber(ledger[i + 3]) or 0 end
      run.delay, run.concurrency, run.max_attempts = read('<dI4I4', run.options or OPTIONS)
    end
    runs[number] = run
  end
  return run or nil
end

-- -- events

-- Remember something out of the ordinary about a request.
local function note(run, fingerprint, what, detail)
  if not run.notes[fingerprint] then
    run.notes[fingerprint] = ''
    run.noted[#run.noted + 1] = fingerprint
  end
  run.notes[fingerprint] = run.notes[fingerprint] .. pack('<dI4c0I4c0', real, #what, what, #detail, detail)
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
  for kind, more in pairs(run.kinds) do
    if call('HINCRBY', run.key .. ':kinds', kind, more) <= 0 then call('HDEL', run.key .. ':kinds', kind) end
  end
end

local function save_ledger(run)
  if not run.is_changed then return end
  local fields = {}
  for _, name in ipairs(COUNTERS) do
    fields[#fields + 1] = name
    fields[#fields + 1] = run[name]
  end
  if not run.options then
    fields[#fields + 1] = 'options'
    fields[#fields + 1] = OPTIONS
    run.options = OPTIONS
  end
  call('HSET', run.key, unpack(fields))
end

local REWOUND = 'REWOUND the store does not know a change that it had acknowledged'

-- Whether the request of a receipt (fingerprint and token) is done under that token.
local function is_done(receipt)
  local record = call('HGET', own.key .. ':req', sub(receipt, 1, 16))
  return record and string.byte(record) == DONE and sub(record, 30, 37) == sub(receipt, 17, 24)
end

if ARGV[3] ~= '' then
  local number, name = string.match(ARGV[3], '^(%d+) ?(.*)$')
  own = run_of(tonumber(number))
  -- A store that was rewound may give the number of a run that it has lost to another one.
  if not own or (name ~= '' and name ~= own.name) then return redis.error_reply('NORUN there is no such run') end
  if RECEIPT ~= '' and not is_done(RECEIPT) then return redis.error_reply(REWOUND) end
end
