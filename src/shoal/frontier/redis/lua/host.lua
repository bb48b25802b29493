-- Change the politeness of a host. ARGV: its name, the changes, the reason of a block. Returns its number if lanes of other
-- runs may be due earlier now, else ''.

local name, update, reason = ARGV[5], ARGV[6], ARGV[7]
local number = ALL_HOSTS
if name ~= DEFAULT_HOST then number = number_hosts({name})[1] else load_hosts({}) end
if hosts[number] == FRESH then hosts[number] = new_host(number, name) end
local host = hosts[number]
host.name = name

local values, at, sooner = {read(UPDATE, update)}, 0, number == ALL_HOSTS
-- The next value of the update, in the order of its layout; before each one is what to do with it.
local function changed(old, none)
  at = at + 2
  if values[at - 1] == KEEP then return old end
  return values[at - 1] == SET and values[at] or none
end
-- A delay that replaces the default may be shorter than the default.
local function changed_delay(old, replaces)
  local new = changed(old, NONE)
  local was_set, is_set = old == old, new == new
  sooner = sooner or new < old or (was_set and not is_set) or (replaces and is_set and not was_set)
  return new
end
local old = host.settings
local delay, crawl_delay = changed_delay(old.delay, true), changed_delay(old.crawl_delay)
local learned_delay, concurrency = changed_delay(old.learned_delay), changed(old.concurrency, -1)
host.settings = settings_of(pack(SETTINGS, delay, crawl_delay, learned_delay, concurrency))
local block_for = changed(nil, 0)
if block_for == 0 then
  sooner = sooner or host.blocked_until > now
  host.blocked_until, host.block_reason = 0, ''
elseif block_for and now + block_for > host.blocked_until then -- a shorter block does not end a longer one
  host.blocked_until, host.block_reason = now + block_for, reason
end
change(host)
state.freed, state.is_changed = state.freed + 1, true -- there may be more room
if number ~= ALL_HOSTS then touch(own, number, 'stale') end
finish()
return sooner and number or ''
