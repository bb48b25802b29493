-- Which lane may be leased from: the same decisions as shoal/frontier/politeness.py makes in memory.

-- In all that follows, a table is asked row by row with LATERAL (... LIMIT 1), which is looked up in its index whatever the
-- planner believes of its size: a table that was empty when it was last looked at has a million rows a minute later.
-- Rows that were found so, and locked, are changed by their ctid. One that was not locked could have moved, and would be
-- passed over; that must not happen, so their number is checked.

CREATE OR REPLACE FUNCTION not_locked() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a row was changed that was not locked' USING ERRCODE = 'serialization_failure';
END
$$;

-- A lane with what is in force for its host. After a rewind of the store nobody knows when a host was last fetched from:
-- it counts as fetched from at that moment, which is the ended_at of host 0.
CREATE OR REPLACE VIEW politeness AS
SELECT l.id AS lane, l.run, l.host, l.place, l.best_rank, l.best_id, l.due, l.ctid AS tid,
       CASE WHEN d.delay > 0 THEN 1 ELSE coalesce(h.concurrency, e.concurrency, r.concurrency) END - h.in_flight AS room,
       greatest(CASE WHEN d.delay > 0 THEN greatest(h.ended_at, e.ended_at) + d.delay ELSE 0 END, h.blocked_until)
           AS due_at
FROM lane l
CROSS JOIN LATERAL (SELECT * FROM host WHERE id = l.host LIMIT 1) h
CROSS JOIN LATERAL (SELECT delay, concurrency FROM run WHERE id = l.run LIMIT 1) r
CROSS JOIN LATERAL (SELECT delay, concurrency, ended_at FROM host WHERE id = 0 LIMIT 1) e
CROSS JOIN LATERAL (
    SELECT greatest(coalesce(h.delay, e.delay, r.delay), h.crawl_delay, h.learned_delay) AS delay
) d;

CREATE OR REPLACE FUNCTION place_of(_best_id bigint, _room integer, _due_at double precision, _now double precision)
RETURNS smallint LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN _best_id IS NULL THEN 0 WHEN _room <= 0 THEN 3 WHEN _due_at > _now THEN 2 ELSE 1 END::smallint
$$;

-- When a lane is to be looked at again: see full_lanes().
CREATE OR REPLACE FUNCTION due_of(_place smallint, _due_at double precision, _now double precision)
RETURNS double precision LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE _place WHEN 2 THEN _due_at WHEN 3 THEN _now + 2 END
$$;

-- Put lanes where they belong, after something of their hosts has changed. The caller has locked both. (In plpgsql, as
-- all that is not called by clients: it keeps its plans.)
CREATE OR REPLACE FUNCTION place_lanes(_lanes integer[], _now double precision) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    UPDATE lane SET place = s.place, due = due_of(s.place, s.due_at, _now)
        FROM (
            SELECT p.tid, place_of(p.best_id, p.room, p.due_at, _now) AS place, p.due_at
            FROM unnest(_lanes) u(lane) CROSS JOIN LATERAL (SELECT * FROM politeness WHERE lane = u.lane LIMIT 1) p
        ) s
        WHERE lane.ctid = s.tid
            AND (lane.place <> s.place OR lane.due IS DISTINCT FROM due_of(s.place, s.due_at, _now));
END
$$;

-- Some lanes that wait for a place on these hosts: of each host the few that were not looked at for the longest time.
-- Whoever frees a place puts them where they belong. They are few, since thousands of runs may wait for one host; whichever
-- is passed over is looked at by the next lease of its run that comes after its due time.
CREATE OR REPLACE FUNCTION full_lanes(_hosts integer[]) RETURNS integer[] LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        SELECT f.id FROM (SELECT DISTINCT u.host FROM unnest(_hosts) u(host)) u
        CROSS JOIN LATERAL (
            SELECT l.id FROM lane l WHERE l.host = u.host AND l.place = 3 ORDER BY l.host, l.due LIMIT 8
        ) f);
END
$$;

CREATE OR REPLACE FUNCTION lock_hosts(_hosts integer[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM host WHERE id = ANY(_hosts) ORDER BY id FOR NO KEY UPDATE;
END
$$;

CREATE OR REPLACE FUNCTION lock_lanes(_lanes integer[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM lane WHERE id = ANY(_lanes) ORDER BY id FOR NO KEY UPDATE;
END
$$;

-- Leases ended on these hosts, one for each entry (-1: none). The caller has locked them.
CREATE OR REPLACE FUNCTION free_hosts(_hosts integer[], _contacted boolean[], _now double precision)
RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _rows integer;
BEGIN
    UPDATE host SET in_flight = in_flight - s.n, ended_at = CASE WHEN s.contacted THEN _now ELSE ended_at END
        FROM (
            SELECT x.tid, e.n, e.contacted
            FROM (
                SELECT u.host, count(*) AS n, bool_or(u.contacted) AS contacted
                FROM unnest(_hosts, _contacted) u(host, contacted) GROUP BY u.host
            ) e
            CROSS JOIN LATERAL (SELECT h.ctid AS tid FROM host h WHERE h.id = e.host LIMIT 1) x
        ) s
        WHERE host.ctid = s.tid;
    GET DIAGNOSTICS _rows = ROW_COUNT;
    IF _rows <> (SELECT count(DISTINCT u.host) FROM unnest(_hosts) u(host) WHERE u.host > 0) THEN
        PERFORM not_locked();
    END IF;
END
$$;

-- Requests are ready in these lanes, new or once more. The caller has locked them. A lane that was empty is opened.
CREATE OR REPLACE FUNCTION fill_lanes(_lanes integer[], _ranks double precision[], _ids bigint[])
RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _rows integer;
BEGIN
    UPDATE lane SET
        ready = ready + s.n,
        place = CASE WHEN place = 0 THEN 1 ELSE place END,
        best_rank = CASE WHEN best_id IS NULL OR (s.rank, s.id) < (best_rank, best_id) THEN s.rank ELSE best_rank END,
        best_id = CASE WHEN best_id IS NULL OR (s.rank, s.id) < (best_rank, best_id) THEN s.id ELSE best_id END
        FROM (
            SELECT x.tid, f.rank, f.id, f.n
            FROM (
                SELECT DISTINCT ON (u.lane) u.lane, u.rank, u.id, count(*) OVER (PARTITION BY u.lane) AS n
                FROM unnest(_lanes, _ranks, _ids) u(lane, rank, id) ORDER BY u.lane, u.rank, u.id
            ) f
            CROSS JOIN LATERAL (SELECT l.ctid AS tid FROM lane l WHERE l.id = f.lane LIMIT 1) x
        ) s
        WHERE lane.ctid = s.tid;
    GET DIAGNOSTICS _rows = ROW_COUNT;
    IF _rows <> (SELECT count(DISTINCT u.lane) FROM unnest(_lanes) u(lane)) THEN
        PERFORM not_locked();
    END IF;
END
$$;
