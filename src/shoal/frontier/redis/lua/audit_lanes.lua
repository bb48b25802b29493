-- Check what leads to the requests of a run: lanes, leases, and what belongs to the store. ARGV: cursor of the lanes, how many
-- to read. Returns the next cursor ('0' at the end), the counters of the run, how many ready requests these lanes have, and
-- the faults. The first call also checks everything but the lanes.

local is_first = ARGV[5] == '0'
local ready = 0

-- -- leases: of all runs, as they share the hosts

local in_flight, leased, fingerprints, lease_hosts = {}, 0, {}, {}
for _, member in ipairs(call('ZRANGE', LEASES, 0, -1)) do
  if #member == 24 then
    local run, host, fingerprint = read(LEASE_MEMBER, member)
    in_flight[host] = (in_flight[host] or 0) + 1
    if run == own.number then
      leased = leased + 1
      fingerprints[leased], lease_hosts[leased] = fingerprint, host
    end
  end
end

-- -- lanes and their hosts

local function check_lane(number, record)
  local front = math.floor(#record / FRONTED_SIZE)
  local list, set, more = call('LLEN', list_key(own, number)), call('ZCARD', set_key(own, number)), sub(record, -1)
  if record == '' or more == '.' then
    if list + set > 0 then blame('ready', number, list + set) end
    list, set = 0, 0
  elseif more == '+' and set > 0 then
    blame('ready', number, set)
    set = 0
  end
  ready = ready + front + list + set
  if record == '' then return end
  local is, member = place_of_lane(number, record)
  if not PLACES[is] or not call('ZSCORE', own.key .. PLACES[is], member) then blame('lanes', number) end
end

local numbers = {}
local cursor = scan(own.key .. ':lane', ARGV[5], ARGV[6], function(number, record)
  numbers[#numbers + 1] = number
  check_lane(number, record)
end)
local records, names = fetch(HOSTS, numbers), {}
for i, number in ipairs(numbers) do
  names[i] = ''
  if records[i] then
    local host = read_host(number, records[i])
    names[i] = host.name
    if host.in_flight ~= (in_flight[number] or 0) then blame('in flight', number) end
  else
    blame('hosts', number)
  end
end
for i, number in ipairs(fetch(PREFIX .. 'name', names)) do
  if names[i] ~= '' and number ~= numbers[i] then blame('hosts', numbers[i]) end
end

-- -- everything else

-- A fault if there are fewer of something than the run counts.
local function expect(kind, counted, stored)
  if counted < stored then blame(kind, '', stored - counted) end
end

local function check_sizes()
  expect('requests', call('HLEN', own.key .. ':req'), own.pushed)
  expect('waiting', call('ZCARD', own.key .. ':waiting'), own.waiting)
  expect('leases', leased, own.leased)
  expect('failures', call('HLEN', own.key .. ':dead'), own.dead)
  expect('rewinds', call('LLEN', own.key .. ':rewinds'), math.min(own.rewinds, 100))
  local kinds, dead, refused = call('HGETALL', own.key .. ':kinds'), 0, 0
  for i = 1, #kinds, 2 do
    dead = dead + tonumber(kinds[i + 1])
    if kinds[i] == FULL_KIND then refused = tonumber(kinds[i + 1]) end
  end
  if dead ~= own.dead then blame('failures', '', math.abs(dead - own.dead)) end
  expect('refused', call('ZCARD', own.key .. ':refused'), refused)
end

local function check_leases()
  for i, record in ipairs(fetch(own.key .. ':req', fingerprints)) do
    local request = read_record(record)
    if not request or request.state ~= LEASED or request.host ~= lease_hosts[i] then
      blame('stray leases', fingerprints[i])
    end
  end
end

local function check_stages()
  local left = 0
  for _, entry in ipairs(call('LRANGE', STAGES, 0, -1)) do
    local token, chunks, links = read_stage(entry)
    local key = stage_key(token)
    left = left + links
    for place = next_chunk(key), chunks - 1 do
      local chunk = call('HGET', key, place)
      if chunk then links = links - read(CHUNK, chunk) end
    end
    if links > 0 then blame('links', '', links) end
  end
  expect('links', left, own.incoming)
  local lost = tonumber(call('HGET', own.key, 'lost_links')) or 0
  if lost > 0 then blame('links', '', lost) end
end

local function check_run()
  for _, name in ipairs({'spider', 'state', 'created_at', 'settings', 'project', 'ended_at'}) do
    if call('HEXISTS', own.key, name) == 0 then blame('run', name) end
  end
  if call('HGET', PREFIX .. 'runs', own.name) ~= tostring(own.number) then blame('run', 'its name') end
  local roles = call('HKEYS', own.key .. ':claim')
  for i, role in ipairs(fetch(own.key .. ':role', roles)) do
    if not role then blame('roles', roles[i]) end
  end
end

local function check_store()
  local values = call('HMGET', PREFIX .. 'store', 'format', 'run', 'host', 'seen', 'skew', 'freed')
  local named, known = call('HLEN', PREFIX .. 'name'), call('HLEN', HOSTS) - call('HEXISTS', HOSTS, ALL_HOSTS)
  if not values[1] then blame('store', 'format') end
  if (tonumber(values[2]) or 0) < own.number then blame('store', 'run') end
  if (tonumber(values[3]) or 0) < math.max(named, known) then blame('store', 'host') end
  if own.pushed > 0 and not (values[4] and values[5] and values[6]) then blame('store', 'clock') end
  if (tonumber(values[6]) or 0) < own.freed then blame('store', 'freed') end
  if call('HEXISTS', PREFIX .. 'store', 'defaults') > call('HEXISTS', HOSTS, ALL_HOSTS) then blame('hosts', DEFAULT_HOST) end
  if named ~= known then blame('hosts', '', math.abs(named - known)) end
  local documents = call('HLEN', PREFIX .. 'document') - call('ZCARD', PREFIX .. 'documents')
  if documents ~= 0 then blame('documents', '', math.abs(documents)) end
end

if is_first then
  check_sizes()
  check_leases()
  check_stages()
  check_run()
  check_store()
end
return {cursor, call('HGET', own.key, 'counters') or '', ready, found_faults()}
