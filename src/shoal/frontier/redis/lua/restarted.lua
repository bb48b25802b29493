-- The server does not know the lease script of this store: it was restarted or another one took over, and it may have
-- lost its last moments. Nobody can tell when each host was fetched from, so all of them wait one delay from now.
-- In a store that has never leased there is nothing to wait for. Returns whether there was.

if call('HSETNX', PREFIX .. 'store', 'leased', 1) == 1 then return 0 end
load_hosts({})
hosts[0].ended_at = now
change(hosts[0])
finish()
return 1
