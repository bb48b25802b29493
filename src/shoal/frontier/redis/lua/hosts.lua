-- Hosts, which all runs of the store share. The number of a host is a string of 4 bytes: scripts pass it on as it is.

local HOSTS = PREFIX .. 'host'
local ALL_HOSTS = '\0\0\0\0' -- the number of the host "*"; in a request: none
local NONE = 0 / 0 -- NaN for "not set"; it is not equal to itself
local hosts, changed_hosts = {}, {}

local known_settings = {} -- by their packed form; most hosts have the same

local function settings_of(packed)
  local found = known_settings[packed]
  if not found then
    local delay, crawl_delay, learned_delay, concurrency = read(SETTINGS, packed)
    found = {
      delay = delay, crawl_delay = crawl_delay, learned_delay = learned_delay, concurrency = concurrency, packed = packed,
    }
    known_settings[packed] = found
  end
  return found
end

local NO_SETTINGS = settings_of(pack(SETTINGS, NONE, NONE, NONE, -1))

local function new_host(number, name)
  return {
    number = number, name = name, in_flight = 0, ended_at = 0, blocked_until = 0, block_reason = '', is_changed = false,
    settings = NO_SETTINGS,
  }
end

-- Stands for every host that this script adds, until it is written. Never changed.
local FRESH = new_host('', '')
local fresh_hosts = {} -- number, record, ...

-- Most hosts have no settings and are not blocked: their records are short. The first number is negative in a short record.
local SHORT_HOST, SHORT_HOST_SIZE = '<i4d', 12 -- -1 - in_flight, ended_at; then the name
local NEW_HOST = pack(SHORT_HOST, -1, 0)

local function add_host(number, name)
  local n = #fresh_hosts
  hosts[number] = FRESH
  fresh_hosts[n + 1] = number
  fresh_hosts[n + 2] = NEW_HOST .. name
end

local function read_host(number, record)
  if not record then return new_host(number, '') end
  local short, last_end = read(SHORT_HOST, record)
  if short < 0 then
    return {
      number = number, name = sub(record, SHORT_HOST_SIZE + 1), in_flight = -1 - short, ended_at = last_end,
      blocked_until = 0, block_reason = '', is_changed = false, settings = NO_SETTINGS,
    }
  end
  local in_flight, ended_at, blocked_until, settings, name, reason = read(HOST, record)
  return {
    number = number, name = name, in_flight = in_flight, ended_at = ended_at, blocked_until = blocked_until,
    block_reason = reason, is_changed = false, settings = settings_of(settings),
  }
end

-- The whole record of a host.
local function whole_host(host)
  return pack(
    HOST, host.in_flight, host.ended_at, host.blocked_until, host.settings.packed, #host.name, host.name,
    #host.block_reason, host.block_reason
  )
end

local function save_host(host)
  if host.settings == NO_SETTINGS and host.blocked_until == 0 then
    return pack(SHORT_HOST, -1 - host.in_flight, host.ended_at) .. host.name
  end
  return whole_host(host)
end

-- Load these hosts into `hosts`, and the host "*": the defaults of all hosts. Its `ended_at` is the time of the last rewind
-- of the store: nobody knows when other hosts were contacted before it.
local function load_hosts(numbers)
  local missing, n = {}, 0
  if not hosts[ALL_HOSTS] then
    hosts[ALL_HOSTS] = true
    missing[1], n = ALL_HOSTS, 1
  end
  for i = 1, #numbers do
    local number = numbers[i]
    if not hosts[number] then
      hosts[number] = true
      n = n + 1
      missing[n] = number
    end
  end
  local records = fetch(HOSTS, missing)
  for i = 1, n do hosts[missing[i]] = read_host(missing[i], records[i]) end
  if turns then turns.load(missing) end
end

-- Mark a host to be written at the end.
local function change(host)
  if not host.is_changed then
    host.is_changed = true
    changed_hosts[#changed_hosts + 1] = host
  end
end

local function save_hosts()
  local fields, n = fresh_hosts, #fresh_hosts
  for i = 1, n, 2 do hosts[fields[i]] = nil end -- whoever needs one reads it
  for _, host in ipairs(changed_hosts) do
    fields[n + 1], fields[n + 2] = host.number, save_host(host)
    n = n + 2
    host.is_changed = false
    if host.number == ALL_HOSTS then call('HSET', PREFIX .. 'store', 'defaults', 1) end -- so an audit notices its loss
  end
  many('HSET', HOSTS, fields)
  changed_hosts, fresh_hosts = {}, {}
end
