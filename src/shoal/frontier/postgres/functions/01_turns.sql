-- Runs that share a host. The rules are in shoal/frontier/host_policy.py. A host that one run uses has no turns.

-- The other runs that share a host, the longest delay first.
CREATE FUNCTION live_uses(_run integer, _host integer, _now double precision)
RETURNS TABLE (run integer, run_id text, delay double precision, nth bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
        SELECT t.run, o.run_id, o.delay, row_number() OVER (ORDER BY o.delay DESC, t.seen DESC)
        FROM (SELECT * FROM turn WHERE host = _host AND run NOT IN (0, _run)) t
        CROSS JOIN LATERAL (SELECT * FROM run WHERE id = t.run AND NOT deleting AND state NOT IN ({RESTING}) LIMIT 1) o
        LEFT JOIN LATERAL (SELECT * FROM presence WHERE run = t.run LIMIT 1) p ON true
        LEFT JOIN LATERAL (SELECT ready FROM lane WHERE id = lane_key(t.run, t.host) LIMIT 1) l ON true
        WHERE {IS_LIVE};
END
$$;

-- Note how these hosts are used: the run that was alone, this run, and no runs that are gone. The caller has locked them.
-- Returns the runs that were alone: they do not know yet that they share hosts, see note_call.
CREATE FUNCTION note_uses(_run integer, _hosts integer[], _now double precision) RETURNS integer[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _alone integer[];
BEGIN
    WITH alone AS (
        INSERT INTO turn (host, run, used, seen)
            SELECT h.id, o.id, greatest(h.in_flight, 1) / o.weight, t.seen
            FROM unnest(_hosts) u(host)
            CROSS JOIN LATERAL (SELECT * FROM host WHERE id = u.host AND NOT shared AND last_run <> _run LIMIT 1) h
            CROSS JOIN LATERAL (SELECT CASE WHEN h.in_flight > 0 THEN _now ELSE h.ended_at END AS seen) t
            CROSS JOIN LATERAL (
                SELECT * FROM run WHERE id = h.last_run AND NOT deleting AND state NOT IN ({RESTING}) LIMIT 1) o
            WHERE {IS_SEEN}
            ON CONFLICT (host, run) DO UPDATE SET used = excluded.used, seen = excluded.seen
            RETURNING run
    )
    SELECT array_agg(DISTINCT a.run) INTO _alone FROM alone a;
    INSERT INTO turn AS t (host, run, used, seen)
        SELECT u.host, _run, coalesce(z.used, 0), _now FROM unnest(_hosts) u(host)
        LEFT JOIN LATERAL (SELECT used FROM turn WHERE host = u.host AND run = 0 LIMIT 1) z ON true
        ON CONFLICT (host, run) DO UPDATE SET used = greatest(t.used, excluded.used), seen = _now;
    DELETE FROM turn x USING unnest(_hosts) u(host) WHERE x.host = u.host AND x.run NOT IN (0, _run) AND NOT EXISTS (
        SELECT FROM live_uses(_run, u.host, _now) t WHERE t.run = x.run AND t.nth < {MAX_SHARING});
    RETURN _alone;
END
$$;

-- Ask for hosts that another run uses, or has used last. The caller has locked them and called note_uses. Returns for each how many requests
-- this run may have now; whether it is due, and the turn of another run; the smallest use of those that ask for it (null:
-- nobody); and its row.
CREATE FUNCTION share_hosts(_run integer, _hosts integer[], _now double precision)
RETURNS TABLE (host integer, shared boolean, room integer, waits boolean, least_used double precision, tid tid)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    UPDATE host h SET shared = s.longest IS NOT NULL, longest = s.longest
        FROM (
            SELECT u.host, CASE WHEN count(*) > 1 THEN max(o.delay) END AS longest FROM unnest(_hosts) u(host)
            CROSS JOIN LATERAL (SELECT * FROM turn WHERE host = u.host AND run > 0) t
            CROSS JOIN LATERAL (SELECT delay FROM run WHERE id = t.run LIMIT 1) o
            GROUP BY u.host
        ) s
        WHERE h.id = s.host AND (h.shared <> (s.longest IS NOT NULL) OR h.longest IS DISTINCT FROM s.longest);
    DELETE FROM turn t USING unnest(_hosts) u(host) CROSS JOIN LATERAL (
            SELECT id FROM host WHERE id = u.host AND NOT shared LIMIT 1) h
        WHERE t.host = h.id;
    RETURN QUERY
        SELECT h.id, h.shared,
            CASE WHEN s.due <= _now THEN least({CONCURRENCY} - h.in_flight, {CONCURRENCY} + {LEAD}) ELSE 0 END,
            s.due <= _now AND {CONCURRENCY} > h.in_flight AND {CONCURRENCY} + {LEAD} <= 0,
            s.least, h.tid
        FROM (SELECT * FROM run WHERE id = _run LIMIT 1) r
        CROSS JOIN (SELECT * FROM host WHERE id = 0 LIMIT 1) e
        CROSS JOIN unnest(_hosts) u(host)
        CROSS JOIN LATERAL (SELECT *, ctid AS tid FROM host WHERE id = u.host LIMIT 1) h
        CROSS JOIN LATERAL (SELECT {DELAY} AS delay) d
        LEFT JOIN LATERAL (SELECT used FROM turn WHERE host = h.id AND run = _run LIMIT 1) t ON true
        CROSS JOIN LATERAL (
            SELECT {DUE_AT} AS due, t.used,
                (SELECT min(a.used) FROM asking(_run, ARRAY[h.id], _now) a WHERE a.is_asking) AS least
        ) s;
END
$$;

-- The other runs that have ready requests for shared hosts.
CREATE FUNCTION asking(_run integer, _hosts integer[], _now double precision)
RETURNS TABLE (host integer, run integer, used double precision, is_asking boolean, is_late boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
        SELECT t.host, t.run, greatest(t.used, z.used), {IS_ASKING}, p.asked > 0 AND NOT {IS_ASKING}
        FROM (SELECT * FROM run WHERE id = _run LIMIT 1) r
        CROSS JOIN (SELECT * FROM host WHERE id = 0 LIMIT 1) e
        CROSS JOIN unnest(_hosts) u(host)
        CROSS JOIN LATERAL (SELECT * FROM host WHERE id = u.host AND shared LIMIT 1) h
        CROSS JOIN LATERAL (SELECT {DELAY} AS delay) d
        CROSS JOIN LATERAL (SELECT {DUE_AT} AS due) s
        CROSS JOIN LATERAL (SELECT * FROM turn WHERE host = h.id AND run NOT IN (0, _run)) t
        CROSS JOIN LATERAL (SELECT ready FROM lane WHERE id = lane_key(t.run, t.host) AND ready > 0 LIMIT 1) l
        CROSS JOIN LATERAL (SELECT * FROM presence WHERE run = t.run AND until > _now LIMIT 1) p
        LEFT JOIN LATERAL (SELECT used FROM turn WHERE host = h.id AND run = 0 LIMIT 1) z ON true;
END
$$;

-- Count turns of this run: one for each host in _taken, which may repeat. _hosts, _leasts: shared hosts, in order.
CREATE FUNCTION take_turns(
    _run integer, _taken integer[], _hosts integer[], _leasts double precision[], _now double precision
) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO turn AS z (host, run, used, seen)
        SELECT t.host, 0, least(t.used, s.least), _now FROM unnest(_hosts, _leasts) s(host, least)
        CROSS JOIN LATERAL (SELECT * FROM turn WHERE host = s.host AND run = _run LIMIT 1) t
        WHERE s.host = ANY(_taken)
        ON CONFLICT (host, run) DO UPDATE SET used = greatest(z.used, excluded.used);
    UPDATE turn t SET used = t.used + s.count / s.weight
        FROM (
            SELECT u.host, count(*) AS count, max(r.weight) AS weight FROM unnest(_taken) u(host)
            CROSS JOIN (SELECT weight FROM run WHERE id = _run LIMIT 1) r
            WHERE u.host = ANY(_hosts) GROUP BY u.host
        ) s
        WHERE t.host = s.host AND t.run = _run;
END
$$;

-- Note a lease, for other runs on the same hosts. _is_short: it got less than it wanted. _hosts: the shared hosts that it
-- asked for, or null. _alone: runs that learn now that they share hosts. A run that shares these hosts, and leases, but
-- only from others, stays noted.
--
-- No other function locks `presence` of several runs. It locks them in their order, after all hosts and lanes, and then
-- waits only for the ledger: so no two calls wait for each other.
CREATE FUNCTION note_call(_run integer, _now double precision, _is_short boolean, _hosts integer[], _alone integer[])
RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO presence AS p (run, called, asked, until)
        SELECT u.run, _now, CASE WHEN u.run = _run AND _is_short THEN _now ELSE 0 END,
            CASE WHEN u.run <> _run OR _hosts IS NOT NULL THEN _now + {MEET_SECONDS} ELSE 0 END
        FROM (
            SELECT _run AS run
            UNION SELECT unnest(_alone)
            UNION SELECT t.run FROM turn t
                CROSS JOIN LATERAL (
                    SELECT FROM presence WHERE run = t.run AND until BETWEEN _now AND _now + {MEET_SECONDS} / 2.0
                        AND called > until - {MEET_SECONDS} LIMIT 1) p
                WHERE t.host = ANY(_hosts)
        ) u
        ORDER BY u.run
        ON CONFLICT (run) DO UPDATE SET
            called = CASE WHEN p.run = _run OR p.until <= _now THEN excluded.called ELSE p.called END,
            asked = CASE WHEN p.run = _run OR p.until <= _now THEN excluded.asked ELSE p.asked END,
            until = greatest(p.until, excluded.until);
    IF _hosts IS NOT NULL THEN                -- not of a run that leases now: it notes its own call
        UPDATE presence SET asked = 0         -- their time is over: no host waits for them, unless they ask again
            WHERE run IN (
                SELECT p.run FROM presence p
                WHERE p.run IN (SELECT a.run FROM asking(_run, _hosts, _now) a WHERE a.is_late)
                FOR NO KEY UPDATE SKIP LOCKED);
    END IF;
END
$$;
