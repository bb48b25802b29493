-- Join the cluster. ARGV: name, session, ttl, where, wanted numbers of Runners and Backup Runners, and 1 if it joins
-- again. The numbers apply if the cluster has no members. A member that joins again does not change the numbers of a known
-- cluster. Returns 0 if another member has this name.

local name, session, ttl, where = ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]
local known = member_of(name)
if known and known[1] ~= session then return 0 end
if not known then
  local keeps = ARGV[9] == '1' and call('HEXISTS', HEAD, 'runner') == 1
  if not keeps and call('ZCARD', LIVES) == 0 then call('HSET', HEAD, 'runner', ARGV[7], 'backup', ARGV[8]) end
  record_event('joined', name)
end
save_member(name, session, ttl, where, known and known[4] or '', known and known[5] or 1)
return 1
