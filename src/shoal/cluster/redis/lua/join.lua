-- Become a member. ARGV: name, session, seconds after which it is lost, where it is, how many Runners and Backup Runners
-- the cluster gets if it has no members, and 1 for a member that joins again: then the cluster keeps the counts it has.
-- Returns 0 if another of that name lives.

local name, session, ttl, where = ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]
local known = member_of(name)
if known and known[1] ~= session then return 0 end
if not known then
  local keeps = ARGV[9] == '1' and call('HEXISTS', HEAD, 'runner') == 1
  if not keeps and call('ZCARD', LIVES) == 0 then call('HSET', HEAD, 'runner', ARGV[7], 'backup', ARGV[8]) end
  tell('joined', name)
end
save_member(name, session, ttl, where, known and known[4] or '', known and known[5] or 1)
return 1
