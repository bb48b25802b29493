-- Inspection of a run. These functions change nothing. Those that are called often are in plpgsql, which keeps their plans:
-- planning costs more than the rest.

-- The number of the first item in the log. If a run does not know how many were deleted, it is those before it.
CREATE FUNCTION first_item(_run integer) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT min(i.seq) FROM item i WHERE i.run = _run
$$;

CREATE FUNCTION stats(_run integer)
RETURNS TABLE (
    pushed bigint, ready bigint, waiting bigint, leased bigint, done bigint, dead bigint, duplicates bigint,
    items bigint, trimmed bigint, seeding boolean, incoming bigint, redirects bigint, item_errors bigint, rewinds bigint
) LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
        SELECT g.pushed, g.ready, g.waiting, g.leased, g.done, g.dead, g.duplicates, g.items,
            coalesce(g.trimmed, first_item(_run) - 1, g.items),
            NOT EXISTS (SELECT FROM role r WHERE r.run = _run AND r.role = {SEED_ROLE} AND r.finished),
            g.incoming, g.redirects, g.item_errors, (SELECT count(*) FROM rewind w WHERE w.run = _run)
        FROM ledger g WHERE g.run = _run;
END
$$;

-- What the inventory lists, and its table lacks.
CREATE FUNCTION lost_names(_run integer)
RETURNS TABLE (kind text, name text) LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT i.kind, i.name FROM inventory i WHERE i.run IN (0, _run) AND NOT CASE i.kind
        WHEN 'role' THEN EXISTS (SELECT FROM role r WHERE r.run = i.run AND r.role = i.name)
        WHEN 'rewind' THEN EXISTS (SELECT FROM rewind w WHERE w.run = i.run AND w.id = i.name::bigint)
        WHEN 'document' THEN EXISTS (SELECT FROM document d WHERE d.key = convert_to(i.name, 'UTF8'))
        ELSE EXISTS (SELECT FROM host h WHERE h.name = i.name) END
    ORDER BY i.kind, i.name
$$;

-- What the inventory lacks.
CREATE FUNCTION unlisted_names(_run integer)
RETURNS TABLE (run integer, kind text, name text) LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT * FROM (
        SELECT r.run, 'role', r.role FROM role r WHERE r.run = _run
        UNION ALL SELECT w.run, 'rewind', w.id::text FROM rewind w WHERE w.run = _run
        UNION ALL SELECT 0, 'document', convert_from(d.key, 'UTF8') FROM document d
        UNION ALL SELECT 0, 'host', h.name FROM host h
            WHERE num_nonnulls(h.delay, h.concurrency, h.crawl_delay, h.learned_delay) > 0 OR h.blocked_until > 0
    ) stored
    EXCEPT SELECT i.run, i.kind, i.name FROM inventory i
$$;

-- Faults of a run: see shoal/frontier/faults.py. It is stable, so all of it sees one snapshot.
CREATE FUNCTION faults(_run integer)
RETURNS TABLE (kind text, count bigint, example text) LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    WITH own AS (SELECT lane_key(_run, 0) AS first, lane_key(_run, 0) + 4294967295 AS last),
    queued AS MATERIALIZED (
        SELECT r.id, r.lane, r.rank FROM own, ready r WHERE r.lane BETWEEN own.first AND own.last
    ), lanes AS MATERIALIZED (
        SELECT l.* FROM own, lane l WHERE l.id BETWEEN own.first AND own.last
    ), best AS (
        SELECT DISTINCT ON (r.lane) r.lane, r.rank, r.id, count(*) OVER (PARTITION BY r.lane) AS n
        FROM queued r ORDER BY r.lane, r.rank, r.id
    ), busy AS (
        SELECT h.host, count(*) AS n FROM held h WHERE h.state = {LEASED} GROUP BY h.host
    ), hosts AS MATERIALIZED (
        SELECT u.host FROM lanes u UNION SELECT h.host FROM held h WHERE h.run = _run
    )
    SELECT 'states', count(*), min(q.url) FROM request q
        LEFT JOIN queued r ON r.id = q.id LEFT JOIN held h ON h.id = q.id LEFT JOIN outcome o ON o.id = q.id
        WHERE q.run = _run AND r.id IS NULL AND h.id IS NULL AND o.id IS NULL
    UNION ALL
    SELECT 'ready', count(*), min(q.url) FROM queued r JOIN request q ON q.id = r.id LEFT JOIN lanes l ON l.id = r.lane
        WHERE l.id IS NULL OR (r.lane, r.rank) <> (lane_key(q.run, q.host), coalesce(q.rank, 0))
    UNION ALL
    SELECT 'lanes', count(*), min(h.name) FROM lanes l LEFT JOIN best b ON b.lane = l.id LEFT JOIN host h ON h.id = l.host
        WHERE (l.ready, l.best_rank, l.best_id, l.place = {EMPTY}) IS DISTINCT FROM (coalesce(b.n, 0), b.rank, b.id, b.id IS NULL)
            OR (l.place > {OPEN} AND l.due IS NULL)
    UNION ALL
    SELECT 'hosts', count(*), '' FROM hosts u WHERE NOT EXISTS (SELECT FROM host h WHERE h.id = u.host)
    UNION ALL
    SELECT 'in flight', count(*), min(h.name) FROM hosts u JOIN host h ON h.id = u.host LEFT JOIN busy b ON b.host = u.host
        WHERE h.in_flight <> coalesce(b.n, 0)
    UNION ALL
    SELECT 'holders', count(*), min(q.url) FROM held h JOIN request q ON q.id = h.id
        WHERE h.run = _run AND h.state = {LEASED} AND h.worker > 0
            AND NOT EXISTS (SELECT FROM holder w WHERE w.run = _run AND w.number = h.worker)
    UNION ALL
    SELECT 'items', i.missing, CASE WHEN i.missing > 0 THEN (  -- the first gap after an item
            SELECT 'item ' || min(x.seq) + 1 FROM item x
            WHERE x.run = _run AND x.seq < i.items
                AND NOT EXISTS (SELECT FROM item y WHERE y.run = _run AND y.seq = x.seq + 1)) END
        FROM (SELECT g.items, g.items - coalesce(g.trimmed, first_item(_run) - 1, g.items)
                - (SELECT count(*) FROM item i WHERE i.run = _run) AS missing FROM ledger g WHERE g.run = _run) i
    UNION ALL
    SELECT 'store', 2 - (SELECT count(*) FROM host h WHERE h.id = 0) - (SELECT count(*) FROM clock_state c WHERE c.id = 1), ''
    UNION ALL
    SELECT n.kind || 's', count(*), min(n.name) FROM lost_names(_run) n GROUP BY n.kind
    UNION ALL
    SELECT 'inventory', count(*), min(n.name) FROM unlisted_names(_run) n
$$;

-- The counters and rewinds of a run, counted from its requests; then the stored ones, and the faults. All in one snapshot.
CREATE FUNCTION audit(_run integer)
RETURNS TABLE (
    pushed bigint, ready bigint, waiting bigint, leased bigint, done bigint, dead bigint, duplicates bigint,
    items bigint, trimmed bigint, seeding boolean, incoming bigint, redirects bigint, item_errors bigint, rewinds bigint,
    stored bigint[], kinds text[], counts bigint[], examples text[]
) LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT
        (SELECT count(*) FROM request q WHERE q.run = _run),
        (SELECT count(*) FROM ready r WHERE r.lane BETWEEN lane_key(_run, 0) AND lane_key(_run, 0) + 4294967295),
        h.waiting, h.leased, o.done, o.dead, g.duplicates, g.items,
        coalesce(g.trimmed, first_item(_run) - 1, g.items),
        NOT EXISTS (SELECT FROM role r WHERE r.run = _run AND r.role = {SEED_ROLE} AND r.finished),
        (SELECT coalesce(sum(c.size), 0) FROM stage t JOIN chunk c ON c.token = t.token WHERE t.run = _run),
        g.redirects, g.item_errors, (SELECT count(*) FROM rewind w WHERE w.run = _run),
        ARRAY[g.pushed, g.ready, g.waiting, g.leased, g.done, g.dead, g.incoming], f.kinds, f.counts, f.examples
    FROM ledger g,
        (SELECT count(*) FILTER (WHERE state = {WAITING}) AS waiting, count(*) FILTER (WHERE state = {LEASED}) AS leased
         FROM held WHERE run = _run) h,
        (SELECT count(*) FILTER (WHERE state = {DONE}) AS done, count(*) FILTER (WHERE state = {DEAD}) AS dead
         FROM outcome WHERE run = _run) o,
        (SELECT array_agg(f.kind) AS kinds, array_agg(f.count) AS counts, array_agg(coalesce(f.example, '')) AS examples
         FROM faults(_run) f) f
    WHERE g.run = _run
$$;

-- The name of a worker or slot of a cluster; empty for number 0.
CREATE FUNCTION holder_name(_run integer, _number integer) RETURNS text LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT coalesce((SELECT w.name FROM holder w WHERE w.run = _run AND w.number = _number), '')
$$;

CREATE FUNCTION find(_run integer, _fingerprint bytea) RETURNS bigint LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT q.id FROM request q WHERE q.run = _run AND q.fingerprint = _fingerprint
$$;

-- The first request of a run with this URL. Reads all requests.
CREATE FUNCTION search(_run integer, _url text) RETURNS bigint LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT min(q.id) FROM request q WHERE q.run = _run AND q.url = _url
$$;

-- A staged link, which is not in the queue yet.
CREATE FUNCTION find_staged(_run integer, _fingerprint bytea)
RETURNS TABLE (url text, payload bytea, parent text) LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT c.urls[n.nth], c.payloads[n.nth], q.url
    FROM stage s JOIN chunk c ON c.token = s.token LEFT JOIN request q ON q.id = s.parent
    CROSS JOIN LATERAL (SELECT array_position(c.fingerprints, _fingerprint) AS nth) n
    WHERE s.run = _run AND s.remaining > 0 AND _fingerprint = ANY(c.fingerprints) LIMIT 1
$$;

-- What became of these requests. Names of holders are empty if there is none.
CREATE FUNCTION histories(_ids bigint[])
RETURNS TABLE (
    state smallint, attempts integer, status integer, items integer, at double precision, kind text, reason text, worker text,
    fingerprint bytea, url text, payload bytea, parent text,
    event_at double precision[], event_what text[], event_detail text[], event_worker text[]
) LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT s.state, s.attempts, s.status, s.items, s.at, s.kind, s.reason, holder_name(q.run, s.worker),
        q.fingerprint, q.url, q.payload, p.url, e.at, e.what, e.detail, e.worker
    FROM unnest(_ids) WITH ORDINALITY u(id, nth) JOIN request q ON q.id = u.id LEFT JOIN request p ON p.id = q.parent
    CROSS JOIN LATERAL (  -- `held` has no index for this, so it is read last
        SELECT o.state, o.attempts::integer, o.status::integer, o.items, o.at, o.kind, o.reason, o.worker FROM outcome o
            WHERE o.id = q.id
        UNION ALL SELECT {READY}::smallint, coalesce(r.attempts, 0), coalesce(r.status, 0), coalesce(r.items, 0), r.at, '', '', 0 FROM ready r
            WHERE r.lane = lane_key(q.run, q.host) AND r.rank = coalesce(q.rank, 0) AND r.id = q.id
        UNION ALL SELECT h.state, h.attempts - (NOT h.begun)::integer, h.status, h.items, h.at, '', '',
            CASE h.state WHEN {LEASED} THEN h.worker ELSE 0 END FROM held h
            WHERE h.id = q.id
        LIMIT 1
    ) s
    CROSS JOIN LATERAL (
        SELECT array_agg(e.at ORDER BY e.id) AS at, array_agg(e.what ORDER BY e.id) AS what,
            array_agg(e.detail ORDER BY e.id) AS detail, array_agg(holder_name(q.run, e.worker) ORDER BY e.id) AS worker
        FROM event e WHERE e.request = q.id
    ) e
    ORDER BY u.nth
$$;

-- For each token, the state of its request if that is done or still leased under the token; else -1.
CREATE FUNCTION lease_outcomes(_run integer, _fingerprints bytea[], _tokens bigint[])
RETURNS TABLE (state smallint) LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT coalesce(
        (SELECT h.state FROM held h WHERE h.token = u.token AND h.run = _run AND h.state = {LEASED}),
        (SELECT o.state FROM request q JOIN outcome o ON o.id = q.id
            WHERE q.run = _run AND q.fingerprint = u.fingerprint AND o.token = u.token AND o.state = {DONE}),
        (-1)::smallint)
    FROM unnest(_fingerprints, _tokens) WITH ORDINALITY u(fingerprint, token, nth) ORDER BY u.nth
$$;

-- The next dead requests after this one.
CREATE FUNCTION dead_page(_run integer, _after bigint, _limit integer)
RETURNS bigint[] LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT ARRAY(SELECT o.id FROM outcome o WHERE o.run = _run AND o.state = {DEAD} AND o.id > _after
                 ORDER BY o.id LIMIT _limit)
$$;

CREATE FUNCTION dead_kinds(_run integer) RETURNS TABLE (kind text, count bigint) LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT o.kind, count(*) FROM outcome o WHERE o.run = _run AND o.state = {DEAD} GROUP BY o.kind
$$;

-- When the next waiting request of a run is ready, and the detail of its last event.
CREATE FUNCTION next_retry(_run integer, _offset double precision)
RETURNS TABLE (retry_in double precision, detail text) LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
        SELECT greatest(h.due - clock(_offset), 0), coalesce(
            (SELECT e.detail FROM event e WHERE e.request = h.id ORDER BY e.id DESC LIMIT 1), '')
        FROM held h WHERE h.run = _run AND h.state = {WAITING} ORDER BY h.run, h.due LIMIT 1;
END
$$;

-- The workers that hold leases on these hosts: out of the first leases to expire, so that the cost does not grow with their
-- number. silent_for: of a late worker.
CREATE FUNCTION lease_holders(_offset double precision, _hosts text[])
RETURNS TABLE (host text, run_id text, worker text, leases bigint, silent_for double precision)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    _now double precision := clock(_offset);
BEGIN
    RETURN QUERY
        SELECT o.name::text, r.run_id, coalesce(n.name, ''), l.leases,
            coalesce((SELECT _now - w.beat_at FROM worker w
                WHERE w.run = l.run AND w.name = n.name AND _now - w.beat_at >= w.session * {HEARD_GAP}), 0)
        FROM (
            SELECT h.run, h.host, h.worker, count(*) AS leases
            FROM (SELECT * FROM held h ORDER BY h.due LIMIT {MAX_HELD}) h
            WHERE h.state = {LEASED} AND h.host = ANY(ARRAY(SELECT o.id FROM host o WHERE o.name = ANY(_hosts)))
            GROUP BY h.run, h.host, h.worker
        ) l
        JOIN host o ON o.id = l.host JOIN run r ON r.id = l.run
        LEFT JOIN holder n ON n.run = l.run AND n.number = l.worker;
END
$$;
