-- The memory of the server, as INFO tells it; empty if this user may not ask. In a script, a cluster asks the right node.

local info = redis.pcall('INFO', 'memory')
return type(info) == 'table' and (info.err and '' or info.ok) or info
