-- Raise the format of the store, unless a worker of the old version may be at work. ARGV: the old and the new format. Returns
-- how many requests are leased; 0 if the format was raised.

local leased = call('ZCOUNT', LEASES, '(' .. string.format('%.6f', now), '(inf')
if leased == 0 and call('HGET', PREFIX .. 'store', 'format') == ARGV[5] then
  call('HSET', PREFIX .. 'store', 'format', ARGV[6])
end
return leased
