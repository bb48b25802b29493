-- Workers of a run that send heartbeats.
CREATE TABLE worker (
    run integer NOT NULL,
    name text NOT NULL,                       -- it leases under a slot of this name
    epoch bigint NOT NULL,
    session double precision NOT NULL,
    beat_at double precision NOT NULL,        -- time of its last heartbeat
    pid integer NOT NULL,
    machine text NOT NULL,
    PRIMARY KEY (run, name)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

-- Heartbeats of all workers of a run together. Within a gap, the store may have been away.
CREATE TABLE heard (
    run integer PRIMARY KEY,
    at double precision NOT NULL,             -- time of the last heartbeat
    since double precision NOT NULL           -- since when they came without a long gap
) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

-- Every lease of a worker has a slot now, and fences are rare: they read the leases of the run by `held_due`.
DROP INDEX held_slot;
