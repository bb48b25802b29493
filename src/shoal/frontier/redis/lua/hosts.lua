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

local function read_host(number, record)
  if not record then return new_host(number, '') end
  local in_flight, ended_at, blocked_until, settings, name, reason = read(HOST, record)
  return {
    number = number, name = name, in_flight = in_flight, ended_at = ended_at, blocked_until = blocked_until,
    block_reason = reason, is_changed = false, settings = settings_of(settings),
  }
end

local function save_host(host)
  return pack(
    HOST, host.in_flight, host.ended_at, host.blocked_until, host.settings.packed, #host.name, host.name,
    #host.block_reason, host.block_reason
  )
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
end

-- Mark a host to be written at the end.
local function change(host)
  if not host.is_changed then
    host.is_changed = true
    changed_hosts[#changed_hosts + 1] = host
  end
end

local function save_hosts()
  local fields, n = {}, 0
  for _, host in ipairs(changed_hosts) do
    fields[n + 1], fields[n + 2] = host.number, save_host(host)
    n = n + 2
    host.is_changed = false
  end
  many('HSET', HOSTS, fields)
  changed_hosts = {}
end
