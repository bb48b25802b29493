-- Called when the server does not know the lease script of this store: it was restarted, or a replica took over, and may
-- have lost its last changes. Nobody knows when hosts were last contacted, so each waits one delay from now; not if the
-- store has never leased. Returns 1 if hosts wait.

if call('HSETNX', PREFIX .. 'store', 'leased', 1) == 1 then return 0 end
let_all_wait()
return 1
