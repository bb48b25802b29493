-- Hosts, which all runs share, and facts.

-- Change the values whose flag is set. A shorter block does not end a longer one.
CREATE FUNCTION update_host(
    _run integer, _offset double precision, _name text,
    _set_delay boolean, _delay double precision, _set_concurrency boolean, _concurrency integer,
    _set_crawl_delay boolean, _crawl_delay double precision, _set_learned_delay boolean, _learned_delay double precision,
    _set_block boolean, _block_for double precision, _block_reason text
) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    _host integer := 0;
    _lanes bigint[];
    _until double precision;
    _before record;
    _after record;
BEGIN
    PERFORM check_run(_run);
    IF _name <> {DEFAULT_HOST} THEN
        _host := (hosts_of(ARRAY[_name]))[1];
    END IF;
    PERFORM lock_hosts(ARRAY[_host]);
    IF _host > 0 AND NOT EXISTS (SELECT FROM lane l WHERE l.id = lane_key(_run, _host)) THEN
        PERFORM hold_run(_run);
        PERFORM fill_lanes(ARRAY[lane_key(_run, _host)], NULL, NULL);  -- so that the run lists this host
    END IF;
    SELECT h.* INTO _before FROM host h WHERE h.id = _host;
    _until := CASE WHEN _block_for > 0 THEN clock(_offset) + _block_for ELSE 0 END;
    UPDATE host h SET
        delay = CASE WHEN _set_delay THEN _delay ELSE h.delay END,
        concurrency = CASE WHEN _set_concurrency THEN _concurrency ELSE h.concurrency END,
        crawl_delay = CASE WHEN _set_crawl_delay THEN _crawl_delay ELSE h.crawl_delay END,
        learned_delay = CASE WHEN _set_learned_delay THEN _learned_delay ELSE h.learned_delay END
        WHERE h.id = _host;
    UPDATE host h SET blocked_until = _until, block_reason = CASE WHEN _until > 0 THEN _block_reason ELSE '' END
        WHERE h.id = _host AND _set_block AND (_until = 0 OR _until > h.blocked_until);
    INSERT INTO inventory (run, kind, name) VALUES (0, 'host', _name) ON CONFLICT DO NOTHING;
    IF _host = 0 THEN  -- other hosts are not locked: open all lanes, and each lease checks the host
        _lanes := ARRAY(SELECT l.id FROM lane l WHERE l.place > {OPEN});
        PERFORM lock_lanes(_lanes);
        UPDATE lane l SET place = {OPEN}, due = NULL WHERE l.id = ANY(_lanes) AND l.place > {OPEN};
        RETURN;
    END IF;
    -- If the host only became slower, other lanes may stay: each lease checks the host. Else they may be due earlier.
    SELECT h.* INTO _after FROM host h WHERE h.id = _host;
    _lanes := CASE WHEN _after.blocked_until >= _before.blocked_until
            AND _after.delay IS NOT DISTINCT FROM _before.delay
            AND _after.concurrency IS NOT DISTINCT FROM _before.concurrency
            AND coalesce(_after.crawl_delay, 0) >= coalesce(_before.crawl_delay, 0)
            AND coalesce(_after.learned_delay, 0) >= coalesce(_before.learned_delay, 0)
        THEN ARRAY[lane_key(_run, _host)]
        ELSE ARRAY(SELECT l.id FROM lane l WHERE l.host = _host AND l.place > {OPEN}) || lane_key(_run, _host) END;
    PERFORM lock_lanes(_lanes);
    PERFORM place_lanes(_lanes, clock(_offset));
END
$$;

-- The busiest hosts of a run, out of a thousand with leases and two thousand others, so that the cost does not grow with the
-- number of hosts: the first lanes of an index, never a sort of all lanes.
CREATE FUNCTION host_states(_run integer, _offset double precision, _limit integer)
RETURNS TABLE (
    host text, delays double precision[], limits integer[], in_flight integer, ready integer,
    blocked_for double precision, block_reason text, rival_delay double precision, rival text
) LANGUAGE plpgsql SET enable_sort = off AS $$
#variable_conflict use_column
DECLARE
    _now double precision := clock(_offset);
BEGIN
    RETURN QUERY
        SELECT h.name, ARRAY[h.delay, e.delay, r.delay, h.crawl_delay, h.learned_delay],
            ARRAY[h.concurrency, e.concurrency, r.concurrency], h.in_flight, l.ready, greatest(h.blocked_until - _now, 0),
            h.block_reason, o.delay, o.run_id
        FROM (
            (SELECT l.id, l.host, l.ready FROM (
                SELECT DISTINCT x.host FROM (
                    SELECT x.host FROM held x WHERE x.run = _run AND x.state = {LEASED} ORDER BY x.run, x.due LIMIT 1000
                ) x
            ) x CROSS JOIN LATERAL (SELECT * FROM lane l WHERE l.id = lane_key(_run, x.host) LIMIT 1) l)
            UNION
            (SELECT * FROM (
                (SELECT l.id, l.host, l.ready FROM lane l WHERE l.run = _run AND l.place = {OPEN}
                 ORDER BY l.run, l.best_rank, l.best_id LIMIT 1000)
                UNION ALL
                (SELECT l.id, l.host, l.ready FROM lane l WHERE l.run = _run AND l.place = {FULL}
                 ORDER BY l.run, l.due LIMIT 1000)
                UNION ALL
                (SELECT l.id, l.host, l.ready FROM lane l WHERE l.run = _run AND l.place = {LATER}
                 ORDER BY l.run, l.due LIMIT 1000)
                UNION ALL
                (SELECT l.id, l.host, l.ready FROM lane l
                 WHERE l.id > lane_key(_run, 0) AND l.id < lane_key(_run + 1, 0) ORDER BY l.id LIMIT 1000)
            ) several LIMIT 2000)
        ) l
        CROSS JOIN LATERAL (SELECT * FROM host h WHERE h.id = l.host LIMIT 1) h
        CROSS JOIN LATERAL (SELECT * FROM host e WHERE e.id = 0 LIMIT 1) e
        CROSS JOIN LATERAL (SELECT r.delay, r.concurrency FROM run r WHERE r.id = _run LIMIT 1) r
        LEFT JOIN LATERAL live_uses(_run, h.id, _now) o ON h.shared AND o.nth = 1
        ORDER BY l.ready + h.in_flight DESC, h.name COLLATE "C" LIMIT _limit;
END
$$;

-- One host, whether or not the run has requests of it, or anybody changed it.
CREATE FUNCTION host_state(_run integer, _offset double precision, _name text)
RETURNS TABLE (
    host text, delays double precision[], limits integer[], in_flight integer, ready integer,
    blocked_for double precision, block_reason text, rival_delay double precision, rival text
) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM check_run(_run);
    RETURN QUERY
        SELECT _name, ARRAY[h.delay, e.delay, r.delay, h.crawl_delay, h.learned_delay],
            ARRAY[h.concurrency, e.concurrency, r.concurrency], coalesce(h.in_flight, 0), coalesce(l.ready, 0),
            greatest(coalesce(h.blocked_until, 0) - clock(_offset), 0), coalesce(h.block_reason, ''),
            o.delay, o.run_id
        FROM host e JOIN run r ON r.id = _run LEFT JOIN host h ON h.name = _name
            LEFT JOIN lane l ON l.id = lane_key(_run, h.id)
        LEFT JOIN LATERAL live_uses(_run, h.id, clock(_offset)) o ON h.shared AND o.nth = 1
        WHERE e.id = 0;
END
$$;

-- Set the options of a run. If they changed, its lanes are opened, as other options have placed them.
CREATE FUNCTION set_options(
    _run integer, _max_attempts integer, _delay double precision, _concurrency integer, _link_limit bigint,
    _weight double precision
) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    _lanes bigint[];
BEGIN
    UPDATE run r
        SET max_attempts = _max_attempts, delay = _delay, concurrency = _concurrency, link_limit = _link_limit, weight = _weight
        WHERE r.id = _run AND (r.max_attempts, r.delay, r.concurrency, coalesce(r.link_limit, 0), r.weight)
            <> (_max_attempts, _delay, _concurrency, coalesce(_link_limit, 0), _weight);
    IF FOUND THEN
        _lanes := ARRAY(SELECT l.id FROM lane l WHERE l.run = _run AND l.place > {OPEN});
        PERFORM lock_lanes(_lanes);
        UPDATE lane l SET place = {OPEN}, due = NULL WHERE l.id = ANY(_lanes) AND l.place > {OPEN};
    END IF;
END
$$;

CREATE FUNCTION remember(_offset double precision, _key bytea, _value bytea, _ttl double precision)
RETURNS void LANGUAGE sql SET search_path FROM CURRENT AS $$
    DELETE FROM note n WHERE n.key IN (
        SELECT o.key FROM note o WHERE o.until <= clock(_offset) AND o.key <> _key LIMIT 20 FOR UPDATE SKIP LOCKED
    );
    INSERT INTO note (key, until, value) VALUES (_key, clock(_offset) + _ttl, _value)
        ON CONFLICT (key) DO UPDATE SET until = excluded.until, value = excluded.value
$$;

CREATE FUNCTION recall(_offset double precision, _key bytea) RETURNS bytea LANGUAGE plpgsql AS $$
BEGIN
    RETURN (SELECT n.value FROM note n WHERE n.key = _key AND n.until > clock(_offset));
END
$$;
