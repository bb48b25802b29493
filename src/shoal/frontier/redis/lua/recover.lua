-- Record a rewind that a client noticed. ARGV: seconds since the newest lost change was acknowledged ('' if not known),
-- seconds since the client noticed the rewind; then receipts, newest first, each with its age at that time: age, receipt,
-- ...
-- Returns, packed: when the rewind was noticed, by `now` and by `real`, and how many seconds were lost at most (NaN if not
-- known).

local KEPT = 100
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
-- If a rewind was recorded after the lost change was acknowledged, another client has noticed the same rewind. Each client
-- knows an upper bound of the lost time.
if at and age and at >= now - age then
  if bound == bound and not (lost and lost < bound) then lost = bound end
  call('LSET', key, -1, pack(REWIND, at, shown, lost or NONE))
else
  call('RPUSH', key, pack(REWIND, now - ago, real - ago, lost or NONE))
  call('LTRIM', key, -KEPT, -1)
  own.rewinds, own.is_changed = own.rewinds + 1, true
end
-- Let every host wait one delay. Also if a client notices the rewind later: the store knows nothing of its fetches.
let_all_wait()
return call('LINDEX', key, -1)
