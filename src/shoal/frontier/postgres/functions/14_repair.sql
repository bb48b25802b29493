-- Repair of a run: see shoal/frontier/faults.py.

-- Hosts that have no row, each with a URL.
CREATE FUNCTION missing_hosts(_run integer)
RETURNS TABLE (host integer, url text) LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT q.host, min(q.url) FROM request q
    WHERE q.run = _run AND NOT EXISTS (SELECT FROM host h WHERE h.id = q.host) GROUP BY q.host
$$;

-- Restore what is missing from what is left, and return what is lost: see describe_losses() in faults.py. _hosts, _names: the
-- missing hosts. Nobody changes the tables meanwhile. They are locked in the order of the rows; if a call of a client is in the
-- way of another one, one of them is repeated.
CREATE FUNCTION repair(_run integer, _offset double precision, _hosts integer[], _names text[])
RETURNS TABLE (kind text, name text) LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    _first bigint := lane_key(_run, 0);
    _last bigint := lane_key(_run, 0) + 4294967295;
BEGIN
    PERFORM check_run(_run);
    INSERT INTO role (run, role, token, until, cursor, finished)  -- in a finished run, seeding stays finished
        SELECT _run, n.name, 0, 0, '', true FROM run r, lost_names(_run) n
        WHERE r.id = _run AND r.state = 'finished' AND n.kind = 'role' AND n.name = {SEED_ROLE} ON CONFLICT DO NOTHING;
    RETURN QUERY SELECT n.kind, n.name FROM lost_names(_run) n;
    INSERT INTO rewind (id, run, noticed, at) OVERRIDING SYSTEM VALUE  -- an audit mentions rewinds for ever
        SELECT n.name::bigint, _run, 0, real_clock(_offset) FROM lost_names(_run) n WHERE n.kind = 'rewind'
        ON CONFLICT DO NOTHING;
    LOCK TABLE held, request, host, lane, ready, outcome, ledger IN SHARE ROW EXCLUSIVE MODE;
    INSERT INTO clock_state (id, seen, skew) VALUES (1, 0, 0) ON CONFLICT DO NOTHING;
    INSERT INTO host (id, name, ended_at) OVERRIDING SYSTEM VALUE  -- nobody knows when they were last contacted
        SELECT u.id, u.name, clock(_offset)
        FROM unnest(array_append(_hosts, 0), array_append(_names, {DEFAULT_HOST})) u(id, name) ON CONFLICT DO NOTHING;
    DELETE FROM inventory i USING lost_names(_run) n WHERE i.run IN (0, _run) AND i.kind = n.kind AND i.name = n.name;
    INSERT INTO inventory (run, kind, name) SELECT n.run, n.kind, n.name FROM unlisted_names(_run) n ON CONFLICT DO NOTHING;
    INSERT INTO holder (run, number, name)
        SELECT DISTINCT h.run, h.worker, format('worker %s', h.worker) FROM held h
        WHERE h.run = _run AND h.worker > 0 AND NOT EXISTS (SELECT FROM holder w WHERE w.run = _run AND w.number = h.worker)
        ON CONFLICT DO NOTHING;
    -- Nobody can fetch a request whose record is gone, and each lease of it would fail.
    DELETE FROM ready r WHERE r.lane BETWEEN _first AND _last AND NOT EXISTS (SELECT FROM request q WHERE q.id = r.id);
    DELETE FROM held h WHERE h.run = _run AND NOT EXISTS (SELECT FROM request q WHERE q.id = h.id);
    -- New items of a request get the numbers after those that it has.
    INSERT INTO ready (rank, id, at, lane, attempts, status, items)
        SELECT coalesce(q.rank, 0), q.id, real_clock(_offset), lane_key(q.run, q.host), 0, 0,
            (SELECT coalesce(max(i.position) + 1, 0) FROM item i WHERE i.run = _run AND i.fingerprint = q.fingerprint)
        FROM request q
        LEFT JOIN ready r ON r.lane = lane_key(q.run, q.host) AND r.rank = coalesce(q.rank, 0) AND r.id = q.id
        LEFT JOIN held h ON h.id = q.id LEFT JOIN outcome o ON o.id = q.id
        WHERE q.run = _run AND r.id IS NULL AND h.id IS NULL AND o.id IS NULL;
    -- All lanes with requests are open: a lease checks their hosts.
    INSERT INTO lane AS l (id, run, host, place, ready, best_rank, best_id)
        SELECT DISTINCT ON (u.lane) u.lane, _run, (u.lane & 4294967295)::integer,
            CASE WHEN u.id IS NULL THEN {EMPTY} ELSE {OPEN} END, count(u.id) OVER (PARTITION BY u.lane), u.rank, u.id
        FROM (
            SELECT r.lane, r.rank, r.id FROM ready r WHERE r.lane BETWEEN _first AND _last
            UNION ALL SELECT k.id, NULL, NULL FROM lane k WHERE k.id BETWEEN _first AND _last
        ) u
        ORDER BY u.lane, u.rank, u.id         -- null last
        ON CONFLICT (id) DO UPDATE SET place = excluded.place, due = NULL, ready = excluded.ready,
            best_rank = excluded.best_rank, best_id = excluded.best_id;
    UPDATE host h SET in_flight = s.n
        FROM (
            SELECT u.host, (SELECT count(*) FROM held x WHERE x.host = u.host AND x.state = {LEASED}) AS n
            FROM (SELECT l.host FROM lane l WHERE l.id BETWEEN _first AND _last UNION
                  SELECT x.host FROM held x WHERE x.run = _run) u
        ) s
        WHERE h.id = s.host AND h.in_flight <> s.n;
    INSERT INTO ledger (run, redirects)       -- a redirect that a middleware made has no such status
        SELECT _run, count(*) FROM outcome o
        WHERE o.run = _run AND o.state = {DONE} AND o.items = 0 AND o.status IN (301, 302, 303, 307, 308)
        ON CONFLICT DO NOTHING;
    IF FOUND THEN
        RETURN QUERY VALUES ('estimate', 'redirects'), ('counter', 'duplicates'), ('counter', 'item_errors');
    END IF;
    UPDATE ledger g SET
        pushed = greatest(g.pushed, (SELECT count(*) FROM request q WHERE q.run = _run)),
        ready = (SELECT count(*) FROM ready r WHERE r.lane BETWEEN _first AND _last),
        waiting = (SELECT count(*) FROM held h WHERE h.run = _run AND h.state = {WAITING}),
        leased = (SELECT count(*) FROM held h WHERE h.run = _run AND h.state = {LEASED}),
        done = (SELECT count(*) FROM outcome o WHERE o.run = _run AND o.state = {DONE}),
        dead = (SELECT count(*) FROM outcome o WHERE o.run = _run AND o.state = {DEAD}),
        items = greatest(g.items, (SELECT max(i.seq) FROM item i WHERE i.run = _run),
            (SELECT sum(o.items) FROM outcome o WHERE o.run = _run)),
        incoming = greatest(g.incoming, (SELECT sum(s.remaining) FROM stage s WHERE s.run = _run))
        WHERE g.run = _run;
END
$$;
