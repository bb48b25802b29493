-- Become a member. ARGV: name, session, seconds after which it is lost, where it is, and how many Runners and Backup
-- Runners there are to be if it is the first. Returns 0 if another of that name lives.

local name, session, ttl, where = ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]
local known = member_of(name)
if known and known[1] ~= session then return 0 end
if not known then
  if call('ZCARD', LIVES) == 0 then call('HSET', HEAD, 'runner', ARGV[7], 'backup', ARGV[8]) end
  tell('joined', name)
end
save_member(name, session, ttl, where, known and known[4] or '', known and known[5] or 1)
return 1
