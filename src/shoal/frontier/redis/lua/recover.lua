-- A client has found that the store went back in time. ARGV: how many seconds ago the newest change was acknowledged that
-- is lost ('' if the client does not know), how long ago it noticed; then receipts, newest first, each with how many
-- seconds before it noticed the call was made: age, receipt, ...
-- Returns, packed: when the rewind was noticed, by the clock that never goes back and by the one that people see, and how
-- many seconds were lost at most (NaN if that is not known).

local KEPT, REWIND = 100, '<ddd'
local key, age, lost = own.key .. ':rewinds', tonumber(ARGV[5]), nil
local ago = tonumber(ARGV[6])
for i = 7, #ARGV, 2 do
  if is_done(ARGV[i + 1]) then
    lost = tonumber(ARGV[i])
    break
  end
end

local last = call('LINDEX', key, -1)
local at, shown, bound
if last then at, shown, bound = read(REWIND, last) end
-- If it was recorded after that change was acknowledged, another client has noticed the same rewind. Each of them knows
-- an upper bound of what was lost.
if at and age and at >= now - age then
  if bound == bound and not (lost and lost < bound) then lost = bound end
  call('LSET', key, -1, pack(REWIND, at, shown, lost or NONE))
else
  call('RPUSH', key, pack(REWIND, now - ago, real - ago, lost or NONE))
  call('LTRIM', key, -KEPT, -1)
  own.rewinds, own.is_changed = own.rewinds + 1, true
end
-- Also for a client that notices later: what it had in flight ended just now, and the store knows nothing of it.
load_hosts({})
hosts[0].ended_at = now
change(hosts[0])
finish()
return call('LINDEX', key, -1)
