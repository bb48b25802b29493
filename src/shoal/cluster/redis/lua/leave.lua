-- Be no member any more. ARGV: name, session.

local name = ARGV[3]
if not lives(name, ARGV[4]) then return 0 end
local index, epoch = drop(name, '')
tell('left', name, index, epoch)
return 1
