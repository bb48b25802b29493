-- Change how a host is treated. ARGV: its name, what to change, why it is blocked if it is. Returns the highest number
-- of a host when all lanes may have to move: when the host is "*".

-- Delay, crawl delay, learned delay, concurrency, block; in front of each 0 leave it, 1 set it, 2 back to the default.
local UPDATE = '<BdBdBdBdBd'
local name, update, reason = ARGV[5], ARGV[6], ARGV[7]
local number = 0
if name ~= '*' then number = number_hosts({name})[1] else load_hosts({}) end
local host = hosts[number]
host.name = name

local values, at = {read(UPDATE, update)}, 0
local function changed(old, none)
  at = at + 2
  if values[at - 1] == 0 then return old end
  return values[at - 1] == 1 and values[at] or none
end
host.delay = changed(host.delay, NONE)
host.crawl_delay = changed(host.crawl_delay, NONE)
host.learned_delay = changed(host.learned_delay, NONE)
host.concurrency = changed(host.concurrency, -1)
local block_for = changed(nil, 0)
if block_for == 0 then
  host.blocked_until, host.block_reason = 0, ''
elseif block_for and now + block_for > host.blocked_until then -- a shorter block does not end a longer one
  host.blocked_until, host.block_reason = now + block_for, reason
end
change(host)
free(host, true)
if number ~= 0 then
  touch(own, number)
  finish()
  return 0
end
finish()
return tonumber(call('HGET', PREFIX .. 'store', 'host')) or 0
