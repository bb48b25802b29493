-- Leave the cluster. ARGV: name, session.

local name = ARGV[3]
if not is_member(name, ARGV[4]) then return 0 end
local index, epoch = remove_member(name, '')
record_event('left', name, index, epoch)
return 1
