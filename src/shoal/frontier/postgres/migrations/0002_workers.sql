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

-- The requests of all runs, for people and their tools. A Request is a msgpack map whose first key is `url`: its value begins
-- at byte 8. No row of a union can be changed, so the view is read-only. Times of claims are those of the server.
CREATE VIEW url_work_queue AS
    SELECT
        CASE WHEN substring(q.payload FROM 4 FOR 4) = '\xa375726c'::bytea THEN convert_from(
            CASE
                WHEN get_byte(q.payload, 7) BETWEEN 160 AND 191
                    THEN substring(q.payload FROM 9 FOR get_byte(q.payload, 7) - 160)
                WHEN get_byte(q.payload, 7) = 217 THEN substring(q.payload FROM 10 FOR get_byte(q.payload, 8))
                WHEN get_byte(q.payload, 7) = 218 THEN substring(
                    q.payload FROM 11 FOR get_byte(q.payload, 8) * 256 + get_byte(q.payload, 9))
                WHEN get_byte(q.payload, 7) = 219 THEN substring(
                    q.payload FROM 13 FOR get_byte(q.payload, 9) * 65536 + get_byte(q.payload, 10) * 256
                        + get_byte(q.payload, 11))
            END, 'UTF8') END AS url,
        s.status, s.worker_id, to_timestamp(s.claimed_at) AS claimed_at, greatest(s.attempts - 1, 0) AS retry_count,
        r.run_id
    FROM (
        SELECT y.id, 'pending' AS status, NULL::text AS worker_id, NULL::double precision AS claimed_at, y.attempts
            FROM ready y
        UNION ALL
        SELECT h.id, 'pending', NULL, NULL, h.attempts FROM held h WHERE h.state = 1
        UNION ALL
        SELECT h.id, 'claimed', h.slot, h.at, h.attempts - (NOT h.begun)::integer FROM held h WHERE h.state = 2
        UNION ALL
        SELECT o.id, 'completed', NULL, NULL, o.attempts FROM outcome o WHERE o.state = 3
        UNION ALL
        SELECT o.id, 'failed', NULL, NULL, o.attempts FROM outcome o WHERE o.state = 4
    ) s
    JOIN request q ON q.id = s.id
    JOIN run r ON r.id = q.run AND NOT r.deleting;
