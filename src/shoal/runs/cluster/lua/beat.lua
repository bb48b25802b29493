-- A heartbeat. ARGV: name, session, what the member does, 1 if it is fit. Returns the view, or nothing if the session has
-- ended.

local name, session, doing, fit = ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
local member = member_of(name)
if not member or member[1] ~= session then return false end
save_member(name, session, member[2], member[3], doing, fit)
return view()
