-- Requests. A record has three parts: a head, which changes with the state; rank (the negative priority) and parent, which
-- never change, unless they are 0 or missing; and the payload, the msgpack of the Request. The head of a done request keeps
-- its last token, and has the number of its completion in place of the host.

local LEASES = PREFIX .. 'lease'
local LEASE_MEMBER = '>I4c4c16' -- run, host and fingerprint

-- The values of a record, or nil if another program wrote it.
local function read_record(record)
  if not record or #record < MIN_SIZE then return nil end
  local state, status, items, at, host, attempts, sequence, token, worker, has = read(WHOLE_HEAD, record)
  local rank = 0
  if has % 2 == HAS_RANK and #record >= MIN_SIZE + RANK_SIZE then rank = read(RANK, record, MIN_SIZE + 1) end
  return {
    state = state, attempts = attempts, status = status, items = items, at = at, sequence = sequence, host = host,
    token = token, worker = worker, rank = rank, rest = sub(record, HEAD_SIZE + 1),
  }
end

-- The parent of a request; '' if it has none.
local function record_parent(record)
  local has = string.byte(record, MIN_SIZE)
  if has < HAS_PARENT then return '' end
  local before = MIN_SIZE + (has % 2) * RANK_SIZE
  return sub(record, before + 1, before + FINGERPRINT_SIZE)
end

local function save_record(run, fingerprint, request)
  local records, n = run.records, #run.records
  records[n + 1] = fingerprint
  records[n + 2] = pack(
    HEAD, request.state, request.status, request.items, request.at, request.host, request.attempts, request.sequence,
    request.token, request.worker
  ) .. request.rest
end

-- Change the state of a request.
local function move(run, fingerprint, request, state)
  local from, to = STATE_NAMES[request.state], STATE_NAMES[state]
  if from then run[from] = run[from] - 1 end
  run[to] = run[to] + 1
  run.is_changed = true
  request.state = state
  if state ~= DONE then request.token = NO_TOKEN end
  if state == READY then enqueue(run, request.host, request.rank, request.sequence, fingerprint) end
end

local function die(run, fingerprint, kind, reason)
  run.causes[#run.causes + 1] = fingerprint
  run.causes[#run.causes + 1] = pack(TEXT, #kind, kind) .. reason
  run.kinds[kind] = (run.kinds[kind] or 0) + 1
end

-- A lease expired or was fenced. If it was not begun, its attempt does not count. Returns whether the host may have been
-- contacted.
local function lose(run, fingerprint, request, unbegun)
  if unbegun then
    move(run, fingerprint, request, READY)
    request.attempts, request.at = request.attempts - 1, real
    save_record(run, fingerprint, request)
    return false
  end
  if request.attempts >= run.max_attempts then
    move(run, fingerprint, request, DEAD)
  else
    move(run, fingerprint, request, READY)
  end
  local reason = string.format(LOST_REASON, request.attempts)
  if request.state == DEAD then die(run, fingerprint, LOST_KIND, reason) end
  note(run, fingerprint, LOST_EVENT, reason, request.worker)
  request.at = real
  save_record(run, fingerprint, request)
  return true
end

local function lease_member(run, host, fingerprint) return run.packed_number .. host .. fingerprint end

-- Read packed leases: fingerprints, tokens, and the request of each, or false if it is not leased. A lease is valid only if
-- its request has the same token.
local function read_leases(blob)
  local fingerprints, tokens, at = {}, {}, 1
  while at <= #blob do
    fingerprints[#fingerprints + 1], tokens[#tokens + 1], at = read(LEASE, blob, at)
  end
  local records, requests = fetch(own.key .. ':req', fingerprints), {}
  for i in ipairs(fingerprints) do
    local request = read_record(records[i])
    requests[i] = request and request.state == LEASED and request or false
  end
  return fingerprints, tokens, requests
end

-- -- adding

local offered, offered_list = {}, {} -- requests of this call: true if new and not added yet

-- Read an offered request at this offset of the blob. Returns it and the offset of the next one.
local function read_offer(blob, at)
  local size, fingerprint, name, rank = read(OFFER, blob, at)
  local from = at + OFFER_SIZE
  if offered[fingerprint] == nil then
    offered[fingerprint] = false
    offered_list[#offered_list + 1] = fingerprint
  end
  return {fingerprint = fingerprint, name = name, rank = rank, from = from, to = from + size - 1}, from + size
end

-- Set `offered` to true for requests that the run does not have yet. Returns how many.
local function find_new()
  local known, count = fetch(own.key .. ':req', offered_list), 0
  for i, fingerprint in ipairs(offered_list) do
    if not known[i] then
      offered[fingerprint] = true
      count = count + 1
    end
  end
  return count
end

local HOST_NUMBER = '>I4'

-- The numbers of hosts by name. New hosts get one, which writes to the store.
local function number_hosts(names)
  local key, numbers, new, fields = PREFIX .. 'name', fetch(PREFIX .. 'name', names), {}, {}
  for i = 1, #names do
    if not numbers[i] then new[#new + 1] = i end
  end
  if #new > 0 then
    local last = call('HINCRBY', PREFIX .. 'store', 'host', #new) - #new
    for k, i in ipairs(new) do
      local number = pack(HOST_NUMBER, last + k)
      numbers[i] = number
      add_host(number, names[i])
      fields[2 * k - 1], fields[2 * k] = names[i], number
    end
    many('HSET', key, fields)
  end
  load_hosts(numbers)
  return numbers
end

-- How many links may enter the queue; nil if there is no limit.
local function room_for_links()
  if own.link_limit > 0 then return math.max(0, own.link_limit - own.ready - own.waiting) end
end

-- Record a link that found the queue full.
local function refuse(offer, sequence)
  die(own, offer.fingerprint, FULL_KIND, string.format(FULL_REASON, own.link_limit))
  own.refused[#own.refused + 1] = offer.rank
  own.refused[#own.refused + 1] = pack(QUEUED, sequence, offer.fingerprint)
  offer.parent.refused = offer.parent.refused + 1
end

-- Add new requests of the offers, each only once. `names`: of hosts. `room`: how many links may enter the queue, unless
-- their parent is a redirect; nil: all.
local function add(offers, blob, names, room)
  local new, wanted, indexes = {}, {}, {}
  for _, offer in ipairs(offers) do
    if offered[offer.fingerprint] then
      offered[offer.fingerprint] = false
      new[#new + 1] = offer
      if not indexes[offer.name] then
        wanted[#wanted + 1] = names[offer.name]
        indexes[offer.name] = #wanted
      end
    end
  end
  if #new > 0 then
    local numbers, records, sequence, refused = number_hosts(wanted), own.records, own.sequence, 0
    for i, offer in ipairs(new) do
      sequence = sequence + 1
      local host, state = numbers[indexes[offer.name]], READY
      if room and i > room and not offer.parent.is_redirect then
        refused, state = refused + 1, DEAD
        refuse(offer, sequence)
      else
        enqueue(own, host, offer.rank, sequence, offer.fingerprint)
        if offer.parent then offer.parent.added = offer.parent.added + 1 end
      end
      records[#records + 1] = offer.fingerprint
      local head = pack(HEAD, state, 0, 0, real, host, 0, sequence, NO_TOKEN, 0)
      records[#records + 1] = head .. sub(blob, offer.from, offer.to)
    end
    own.sequence = sequence
    own.pushed = own.pushed + #new
    own.ready = own.ready + #new - refused
    own.dead = own.dead + refused
  end
  own.duplicates = own.duplicates + #offers - #new
  own.is_changed = true
end

-- The arguments of the script from this index.
local function arguments_from(first)
  local rest = {}
  for i = first, #ARGV do rest[i - first + 1] = ARGV[i] end
  return rest
end
