-- Heartbeats of all workers of the store together, for each length of a session. Within a gap, the store may have been away.
DROP TABLE heard;
CREATE TABLE heard (
    session double precision PRIMARY KEY,
    at double precision NOT NULL,             -- time of the last heartbeat of any worker
    since double precision NOT NULL           -- since when they came without a gap that is long for this session
) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);
