-- Read or write a fact that all runs share. ARGV: key; to write also value and seconds to keep it.

local key = PREFIX .. 'fact:' .. ARGV[5]
if ARGV[6] then
  local ttl = tonumber(ARGV[7])
  if ttl <= 0 then return call('DEL', key) end
  save_state()
  call('SET', key, pack('<d', now + ttl) .. ARGV[6], 'PX', string.format('%.0f', math.ceil(ttl * 1000)))
  return 1
end
local fact = call('GET', key)
if not fact then return false end
local until_when, at = read('<d', fact)
return until_when > now and sub(fact, at)
